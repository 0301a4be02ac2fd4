"""Without torchtitan, or with one that is not known, whoever asks for its integration is told so in one line."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan import refusals

PARSE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from torchtitan.config import ConfigManager
ConfigManager().parse_args(sys.argv[1:])
"""


def installed(folder: Path, version: str) -> Path:
    """Metadata of that torchtitan, to be found before the real one's."""
    info = folder / f"torchtitan-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")
    return folder


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back after the test


@pytest.mark.parametrize("version", ["0.2.2", "0.30.0", "0.4.0", "1.0", "3"])
def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: None, version: str) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, version))
    with pytest.raises(UsageError, match=f"torchtitan {version} is installed, and 0.3 is needed: pip install"):
        refusals.refuse_other_versions()


@pytest.mark.parametrize("version", ["0.3.0", "0.3.7", "0.3.1.dev20261101+cu130"])
def test_any_of_the_known_version_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    before = sys.excepthook
    monkeypatch.syspath_prepend(installed(tmp_path, version))
    refusals.refuse_other_versions()
    assert sys.excepthook is before


def test_no_torchtitan(monkeypatch: pytest.MonkeyPatch, hook: None) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(UsageError, match="the torchtitan on Python's path says no version"):
        refusals.refuse_other_versions()
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="torchtitan is not installed: pip install"):
        refusals.refuse_other_versions()


def test_its_own_parser_lets_the_line_through(tmp_path: Path) -> None:
    """What is raised while the module is imported would be "cannot import" there, were it an ImportError."""
    words = ["--module", "lightkeeper.integrations.torchtitan", "--config", "llama3_8b_ft"]
    command = [sys.executable, "-c", PARSE, str(installed(tmp_path, "0.2.2")), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("lightkeeper: torchtitan 0.2.2 is installed, and 0.3 is needed: pip install")
