"""What the command line said, and an environment without this machine's own settings."""

from __future__ import annotations

import os

import pytest


def only_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all settings the environment holds the job's token, ``secret``."""
    for name in [name for name in os.environ if name.startswith("LIGHTKEEPER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "secret")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error, with nothing on standard output."""
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("lightkeeper: ")
    return line.removeprefix("lightkeeper: ")
