"""What of torchtitan is refused, and what is wrong in flags and names: one line each, before anything is built."""

# ruff: noqa: E402 - torchtitan may be missing, and looks for CUDA as soon as it is imported

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan import config_registry, refusals
from lightkeeper.integrations.torchtitan.config import FaultTolerance, enabled_here, fault_tolerant
from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer
from lightkeeper.manager.spawn import SOCKET_VARIABLE

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_titan.py"
TOKEN = {"LIGHTKEEPER_TOKEN": "a-token"}
LAUNCHED = {**TOKEN, SOCKET_VARIABLE: "/somewhere", "LIGHTKEEPER_GROUP": "g0", "LIGHTKEEPER_GROUPS": "3"}


@pytest.fixture(autouse=True)
def hook() -> Iterator[None]:
    """What a config puts in the place of Python's own is put back."""
    before = sys.excepthook
    yield
    sys.excepthook = before


def config(change: Callable[[Any], Any] | None = None) -> FaultTolerantTrainer.Config:
    made = llama3.llama3_debugmodel()
    made.parallelism.spmd_backend = "partial_dtensor"
    made = fault_tolerant(made)
    if change is not None:
        change(made)
    return made


def put(path: str, value: Any) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        *parents, last = path.split(".")
        for name in parents:
            made = getattr(made, name)
        setattr(made, last, value)

    return change


# ---------------------------------------------------------------- options of torchtitan


def test_what_is_supported_is_not_refused() -> None:
    refusals.refuse_unsupported(config(), ranks=8)
    refusals.refuse_unsupported(config(put("parallelism.tensor_parallel_degree", 2)), ranks=8)
    refusals.refuse_unsupported(config(put("parallelism.spmd_backend", "full_dtensor")), ranks=8)
    refusals.refuse_unsupported(config(put("training.mixed_precision_param", "float32")), ranks=1)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (put("parallelism.pipeline_parallel_degree", 2), "parallelism.pipeline_parallel_degree is 2: .*set it to 1"),
        (put("parallelism.context_parallel_degree", 4), "parallelism.context_parallel_degree is 4: .*set it to 1"),
        (put("parallelism.expert_parallel_degree", 2), "parallelism.expert_parallel_degree is 2: .*set it to 1"),
        (put("comm.mode", "fake_backend"), "comm.mode is 'fake_backend': .*real collectives"),
        (put("training.enable_cpu_offload", True), "training.enable_cpu_offload is not supported .*leave it off"),
        (
            put("optimizer.param_groups", [ParamGroupConfig(pattern=".*", optimizer_name="DistMuon")]),
            "optimizer DistMuon is not supported .*give AdamW",
        ),
    ],
)
def test_what_is_not_supported_is_refused(change: Callable[[Any], None], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        refusals.refuse_unsupported(config(change))


@pytest.mark.parametrize(
    ("torch", "ranks", "refused"), [("2.13.0+cpu", 2, True), ("2.13.1", 1, False), ("2.14.1", 8, False)]
)
def test_typed_meshes_need_a_torch_that_has_them(
    monkeypatch: pytest.MonkeyPatch, torch: str, ranks: int, refused: bool
) -> None:
    monkeypatch.setattr(metadata, "version", {"torch": torch}.__getitem__)
    made = config(put("parallelism.spmd_backend", "spmd_types"))
    if not refused:
        refusals.refuse_unsupported(made, ranks)
        return
    with pytest.raises(UsageError, match=r"needs torch 2\.14 .*this is 2\.13\.0\+cpu: give --parallelism.spmd_backend"):
        refusals.refuse_unsupported(made, ranks)


# ---------------------------------------------------------------- configs


class OtherTrainer(Trainer):
    """One with steps of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


@dataclass(kw_only=True, slots=True)
class LargerConfig(Trainer.Config):
    """One of torchtitan's trainer, which does not read what it has more."""

    colour: str = "red"


def test_a_config_of_another_trainer_is_refused() -> None:
    with pytest.raises(UsageError, match="a config of OtherTrainer cannot be made fault tolerant"):
        fault_tolerant(OtherTrainer.Config())


def test_a_config_with_options_of_its_own_is_refused_by_their_names() -> None:
    with pytest.raises(UsageError, match="a LargerConfig has colour, which torchtitan's Trainer does not read"):
        fault_tolerant(LargerConfig())


def test_a_config_that_is_fault_tolerant_stays_as_it_is() -> None:
    made = config()
    assert fault_tolerant(made) is made


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lama3_8b_ft", "torchtitan ships no config 'lama3_8b', so there is no lama3_8b_ft; near are llama3_8b_ft"),
        ("nothing_alike_ft", "torchtitan ships no config 'nothing_alike', so there is no nothing_alike_ft$"),
        ("model_registry_ft", "torchtitan ships no config 'model_registry'"),  # a function that it only imports
        ("llama3_8b", "the configs of this module end in _ft: give --config llama3_8b_ft"),
        ("no.such.thing_ft", "there is no module no.such with configs: tried no.such.config_registry, no.such"),
        (
            "torchtitan.models.llama3.config_registry.llama3_debugmode_ft",
            "torchtitan.models.llama3.config_registry has no config function 'llama3_debugmode'; near are "
            "torchtitan.models.llama3.config_registry.llama3_debugmodel_ft",
        ),
    ],
)
def test_a_config_that_there_is_not(name: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        getattr(config_registry, name)


def test_a_module_that_misses_another_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_titan_configs.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        getattr(config_registry, "my_titan_configs.mine_ft")


def test_an_unknown_name_is_none_to_whoever_only_looks() -> None:
    assert getattr(config_registry, "unheard_of", None) is None and not hasattr(config_registry, "__path__")


def test_torchtitans_parser_lets_the_line_through() -> None:
    words = ["--module", "lightkeeper.integrations.torchtitan", "--config", "llama3_8b"]
    with pytest.raises(UsageError, match="give --config llama3_8b_ft"):
        ConfigManager().parse_args(words)


# ---------------------------------------------------------------- flags and variables


@pytest.mark.parametrize(
    ("value", "launched", "on"), [(None, False, False), (None, True, True), ("0", True, False), ("Yes", False, True)]
)
def test_who_turns_it_on(value: str | None, launched: bool, on: bool) -> None:
    given = {**({"LIGHTKEEPER_ENABLE": value} if value is not None else {}), **(LAUNCHED if launched else {})}
    assert enabled_here(given) is on
    assert enabled_here({**given, "LIGHTKEEPER_GROUP": "g0"}) is (on or value is None)


def test_enable_is_yes_or_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTKEEPER_ENABLE", "maybe")
    with pytest.raises(UsageError, match="LIGHTKEEPER_ENABLE='maybe': give 1 or 0"):
        config()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"group": "g1"}, "--fault_tolerance.group is 'g1', and this group was launched with 'g0': give it to"),
        ({"groups": 4}, "--fault_tolerance.groups is 4, and this group was launched with 3"),
        ({"minimum": 2}, "--fault_tolerance.minimum is 2, and this group was launched with 1"),
    ],
)
def test_a_flag_that_contradicts_the_launcher(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        FaultTolerance(**flags).settings(LAUNCHED)


def test_a_flag_that_repeats_what_the_launcher_was_told() -> None:
    assert FaultTolerance(group="g0", groups=3).settings(LAUNCHED).groups == 3


@pytest.mark.parametrize(
    ("flags", "environment", "line"),
    [
        ({}, {}, "no job token: give --fault_tolerance.token_file"),
        ({"token_file": "/no/such"}, {}, "cannot read the token file /no/such"),
        ({"groups": 2, "spares": 2}, TOKEN, "spares 2 of 2 groups"),
        ({"group": "g 0"}, TOKEN, "group 'g 0': give 1 to 100 of"),
        ({"outage_budget_s": 0.5}, TOKEN, "outage_budget_s 0.5: give 1 to 86400 seconds"),
        ({"lighthouse": "nowhere"}, TOKEN, "lighthouse"),
        ({}, {**TOKEN, "LIGHTKEEPER_GROUPS": "three"}, "LIGHTKEEPER_GROUPS='three' is not a number"),
    ],
)
def test_a_flag_that_cannot_be_right(flags: dict[str, Any], environment: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        FaultTolerance(**flags).settings(environment)


def test_a_flag_is_preferred_to_a_variable() -> None:
    settings = FaultTolerance(groups=2, bucket_mb=4.0).settings({**TOKEN, "LIGHTKEEPER_GROUPS": "3"})
    assert (settings.groups, settings.bucket_mb) == (2, 4.0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--fault_tolerance.deal", "often"], "invalid choice 'often'"),
        (["--fault_tolerance.sync", "never"], "invalid choice 'never'"),
        (["--fault_tolerance.colour", "red"], "--fault_tolerance.colour"),
    ],
)
def test_a_flag_that_torchtitans_parser_refuses(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ConfigManager().parse_args(
            ["--module", "lightkeeper.integrations.torchtitan", "--config", "llama3_debugmodel_ft", *words]
        )
    assert ended.value.code == 2 and line in capsys.readouterr().err


# ---------------------------------------------------------------- as a process


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config", "tiny", "--parallelism.pipeline_parallel_degree", "2"], "pipeline_parallel_degree is 2: a fault"),
        (["--module", "lightkeeper.integrations.torchtitan", "--config", "llama3_9b_ft"], "near are llama3_8b_ft"),
    ],
)
def test_the_process_ends_with_2_and_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    """Under a launcher: `tests/runs/test_titan_facts.py`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words], env={**clean, **TOKEN, **rank, "LIGHTKEEPER_ENABLE": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said, said
    (told,) = [text for text in said.splitlines() if line in text]
    assert told.startswith("lightkeeper: ")
