"""What a launcher other than ours says of a rank, and where it contradicts itself or the group's settings."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.manager.launchers import Launched, end_with_torchrun, read_launched, settings_of
from lightkeeper.manager.processes import Watched, has_ended
from lightkeeper.manager.settings import read_settings

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
}  # fmt: skip


def test_what_torchrun_says() -> None:
    launched = read_launched(TORCHRUN)
    assert launched == Launched(rank=5, ranks=8, nnodes=2, node_rank=1)
    assert launched.node_leader == 4 and launched.node_followers == range(5, 8)


def test_without_any_word_it_is_one_rank() -> None:
    assert read_launched({}) == Launched() and not Launched().node_followers


def test_the_default_process_group_says_it_where_no_variable_does() -> None:
    assert read_launched({}, (1, 2)) == Launched(rank=1, ranks=2)
    assert read_launched({"LOCAL_WORLD_SIZE": "1"}, (1, 2)) == Launched(rank=1, ranks=2, nnodes=2, node_rank=1)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "8"}, "RANK is 8, and WORLD_SIZE 8"),
        ({"RANK": "one"}, "RANK='one' is not a number"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is 3, and WORLD_SIZE 8"),
        ({"GROUP_RANK": "0"}, "GROUP_RANK is 0, but rank 5 with 4 ranks on a node"),
        ({"LOCAL_RANK": "5"}, "LOCAL_RANK is 5, but rank 5 with 4 ranks on a node"),
    ],
)
def test_a_contradiction_within(changed: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=f"^{told}"):
        read_launched({**TORCHRUN, **changed})


def test_a_contradiction_with_the_process_group() -> None:
    with pytest.raises(UsageError, match="^WORLD_SIZE is 8, and in torch's default process group it is 2"):
        read_launched(TORCHRUN, (5, 2))


def test_the_settings_take_ranks_and_nodes_from_it() -> None:
    settings = settings_of(read_settings({}, group="g3"), read_launched(TORCHRUN), {})
    assert (settings.ranks, settings.nnodes, settings.node_rank, settings.group) == (8, 2, 1, "g3")
    assert settings.ranks_here == range(4, 8)
    again = {"LIGHTKEEPER_RANKS": "8", "LIGHTKEEPER_NNODES": "2"}
    assert settings_of(read_settings(again), read_launched(TORCHRUN), again).ranks == 8


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"LIGHTKEEPER_RANKS": "4"}, "ranks is 4 (LIGHTKEEPER_RANKS), and what started this rank makes it 8"),
        ({"LIGHTKEEPER_RANKS": "1"}, "ranks is 1 (LIGHTKEEPER_RANKS), and what started this rank makes it 8"),
        ({"LIGHTKEEPER_NODE_RANK": "0"}, "node_rank is 0 (LIGHTKEEPER_NODE_RANK), and what started this rank makes"),
    ],
)
def test_settings_that_say_otherwise(environment: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(read_settings(environment), read_launched(TORCHRUN), environment)
    assert str(error.value).startswith(told)


def test_several_ranks_that_nobody_started() -> None:
    with pytest.raises(UsageError, match="^ranks is 2 .* makes it 1 .*use `lightkeeper launch`"):
        settings_of(read_settings({}, ranks=2), read_launched({}), {})


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
from lightkeeper.manager.launchers import end_with_torchrun
print(end_with_torchrun(os.environ), os.getpid(), flush=True)
time.sleep(600)
'''])
os.wait()
"""


def test_a_rank_ends_with_torchrun_and_is_seen_to_end_after_it() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        watched, rank = map(int, parent.stdout.readline().split())
        assert watched == parent.pid
        child, launcher = os.pidfd_open(rank), Watched(watched, "torchrun")
        assert launcher.how_it_ended() == "" and not has_ended(rank)
        parent.send_signal(signal.SIGKILL)
        assert select.select([child], [], [], 60)[0], "the rank has not ended"
        assert launcher.how_it_ended() == f"torchrun (pid {parent.pid}) was killed by SIGKILL"
        os.close(child)
    assert has_ended(rank) or has_ended(parent.pid)


def test_a_rank_of_another_launcher_is_left_alone() -> None:
    assert end_with_torchrun({"SLURM_PROCID": "0", "RANK": "0"}) is None
