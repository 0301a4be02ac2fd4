"""`launch --torchtitan` renames what the arguments say of module and config, and leaves the rest alone."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from lightkeeper.cli.titan import MODULE, command_of
from lightkeeper.errors import UsageError

OURS = ("-m", "torchtitan.train", "--module", MODULE, "--config")


@pytest.mark.parametrize(
    ("words", "config", "rest"),
    [
        ("--module llama3 --config llama3_8b", "llama3.llama3_8b_ft", ""),
        ("--config=llama3_8b --module=llama3 --training.steps=9", "llama3.llama3_8b_ft", "--training.steps=9"),
        ("--config llama3_8b", "llama3_8b_ft", ""),
        ("--config llama3_8b_ft", "llama3_8b_ft", ""),
        (f"--module {MODULE} --config llama3_8b", "llama3_8b_ft", ""),
        (f"--module {MODULE} --config a.b.c_ft", "a.b.c_ft", ""),
        ("--module my.pack --config tiny_ft", "my.pack.tiny_ft_ft", ""),  # whatever its function is called
        ("--module x --metrics.log_freq 1 --config y --module z", "z.y_ft", "--metrics.log_freq 1"),
        ("--compile.enable --config llama3_8b -h", "llama3_8b_ft", "--compile.enable -h"),
    ],
)
def test_arguments_of_torchtitan(words: str, config: str, rest: str) -> None:
    assert command_of(words.split()) == (*OURS, config, *rest.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--module llama3", "the arguments name no config"),
        ("--config", "--config has no value"),
        ("--module --config x", "--module has no value"),
        ("--config= --module llama3", "--config has no value"),
        ("examples/train_titan.py --config tiny", "'examples/train_titan.py' is no argument of torchtitan.train"),
    ],
)
def test_arguments_that_are_not(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"^--torchtitan: .*{told}.*: lightkeeper launch"):
        command_of(words.split())


def test_without_torchtitan_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back after the test

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UsageError, match="pip install 'lightkeeper\\[torchtitan\\]'$"):
        command_of(["--config", "llama3_8b"])
