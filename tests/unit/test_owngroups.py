"""The time-outs of the group's own process groups: set where the script says nothing, refused where too short."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import constants, distributed_c10d

from lightkeeper.errors import UsageError
from lightkeeper.manager import ncclenv, owngroups
from lightkeeper.manager.settings import Settings

SHORT = Settings(outage_budget_s=1).timeouts  # a reduce has 12 s, the group's own collectives 20
LONG = Settings(outage_budget_s=300).timeouts  # 3600 and 6000: more than torch's own half hour


@pytest.fixture(autouse=True)
def torchs_defaults() -> Iterator[None]:
    yield
    for name in owngroups._DEFAULTS:
        setattr(distributed_c10d, name, getattr(constants, name))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The default group of two ranks, of which this is one: lazily made, it waits for nobody."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")

    def make(timeout_s: float | None) -> Any:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timeout)
        return distributed_c10d._get_default_group()

    yield make
    dist.destroy_process_group()


def seconds_of(group: Any) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


CODE = """
import sys
from datetime import timedelta
from lightkeeper.manager.owngroups import set_default
{first}
set_default(77.0)
assert ("torch" in sys.modules) == {loaded}
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seconds = [g._get_backend(__import__("torch").device("cpu")).options._timeout for g in (c10d._get_default_group(), dist.new_group([0]))]
assert seconds == [timedelta(seconds=77)] * 2, seconds
assert c10d._get_default_timeout("nccl") == timedelta(seconds=77)
print(c10d.__spec__.loader.get_source(c10d.__name__)[:3] != "", [f for f in sys.meta_path if "lightkeeper" in str(type(f))])
"""  # noqa: E501


def test_it_is_set_before_torch_is_imported_and_imports_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(first="", loaded=False)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "True []\n", done.stdout + done.stderr


def test_it_is_set_in_a_process_that_has_imported_torch() -> None:
    owngroups.set_default(77.0)
    assert distributed_c10d._get_default_timeout("gloo") == timedelta(seconds=77)
    assert distributed_c10d._get_default_timeout("nccl") == timedelta(seconds=77)


def test_a_group_with_torchs_own_is_raised_if_that_is_too_short(pair: Any) -> None:
    group = pair(None)
    owngroups.settle(SHORT, on_gpu=False)
    assert seconds_of(group) == 1800, "more than enough: it is left alone"
    owngroups.settle(LONG, on_gpu=False)
    assert seconds_of(group) == 6000


def test_what_the_script_gave_is_kept_or_refused(pair: Any) -> None:
    group = pair(13.0)
    owngroups.settle(SHORT, on_gpu=False)
    assert seconds_of(group) == 13, "above the 12 s of a reduce"
    with pytest.raises(UsageError) as raised:
        owngroups.settle(Settings(outage_budget_s=2).timeouts, on_gpu=False)
    assert str(raised.value) == (
        "the time-out 13 s that the script gave to a process group must be above reduce_timeout_s 24 (12 x "
        "outage_budget_s): a group's ranks wait for the one that stands in a reduce; leave it out of "
        "init_process_group and new_group, or lower outage_budget_s"
    )
    assert seconds_of(group) == 13


def test_a_rank_alone_waits_for_nobody() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=3))
    try:
        owngroups.settle(LONG, on_gpu=False)
        assert seconds_of(distributed_c10d._get_default_group()) == 3
    finally:
        dist.destroy_process_group()


def test_on_a_gpu_the_variables_are_looked_at(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name in (*ncclenv.unset({}, SHORT), *ncclenv.OLD_NAMES.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ncclenv.HEARTBEAT, "12")
    owngroups.settle(SHORT, on_gpu=False)
    with pytest.raises(UsageError, match="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=12 must be above reduce_timeout_s 12"):
        owngroups.settle(SHORT, on_gpu=True)
    monkeypatch.setenv(ncclenv.HEARTBEAT, "13")
    monkeypatch.setenv(ncclenv.HANDLING, "0")
    owngroups.settle(SHORT, on_gpu=True)
    assert "lightkeeper: TORCH_NCCL_ASYNC_ERROR_HANDLING=0: kept" in capsys.readouterr().err
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", ncclenv.NONBLOCKING):
        monkeypatch.delenv(name)
