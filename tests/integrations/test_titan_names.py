"""What ``--module`` and ``--config`` name, by torchtitan's own parser: its configs, and those of anybody's module."""

# ruff: noqa: E402 - torchtitan may be missing, and looks for CUDA as soon as it is imported

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

from torchtitan.config import ConfigManager

from lightkeeper.cli.titan import command_of
from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer

PACK = """
from torchtitan.models.llama3.config_registry import llama3_debugmodel
def tiny():
    return llama3_debugmodel()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of somebody's, one of which cannot be imported."""
    (tmp_path / "titan_pack").mkdir()
    (tmp_path / "titan_pack" / "__init__.py").write_text("")
    (tmp_path / "titan_pack" / "config_registry.py").write_text(PACK)
    (tmp_path / "titan_single.py").write_text(PACK)
    (tmp_path / "titan_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.excepthook", lambda *_: None)  # put back after the test


def named(words: str) -> tuple[Any, list[str]]:
    """The config that torchtitan gets for these arguments of `launch --torchtitan`, and what is left of them."""
    config, rest = ConfigManager()._load_config([*command_of(words.split())[2:]])
    return config, rest


@pytest.mark.parametrize(
    ("words", "flavor"),
    [
        ("--module llama3 --config llama3_8b", "8B"),
        ("--module torchtitan.models.llama3 --config llama3_8b", "8B"),
        ("--module torchtitan.models.llama3.config_registry --config llama3_8b", "8B"),
        ("--config llama3_8b", "8B"),
        ("--module titan_pack --config tiny", "debugmodel"),
        ("--module titan_single --config tiny", "debugmodel"),
    ],
)
def test_a_config_is_made_fault_tolerant(words: str, flavor: str) -> None:
    config, rest = named(words + " --training.steps 7")
    assert isinstance(config, FaultTolerantTrainer.Config) and config.model_spec.flavor == flavor
    assert rest == ["--training.steps", "7"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--module llama3 --config llama9",
            "torchtitan.models.llama3.config_registry has no config function 'llama9'; near are llama3.llama3_8b_ft, "
            "llama3.llama3_70b_ft",
        ),
        (
            "--module titan_missing --config tiny",
            "there is no module titan_missing with configs: tried titan_missing.config_registry, titan_missing",
        ),
    ],
)
def test_a_name_that_is_none(words: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        named(words)
    assert str(error.value) == told


def test_a_module_that_lacks_something_is_not_said_to_be_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        named("--module titan_broken --config tiny")
