"""A run under a supervisor of which one group, then all are killed: how long each stage of their return takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lightkeeper.bench import _stages
from lightkeeper.bench._trainers import say
from lightkeeper.chaos.acts import Hit, kill_tree
from lightkeeper.chaos.faults import RUN
from lightkeeper.chaos.supervised import Supervised
from lightkeeper.events.lineage import pick
from lightkeeper.events.of_checkpoints import CheckpointSaved

BACK_S_MAX = 240.0
STEPS = 5  # that all must have done before and after


def run_stages() -> tuple[dict[str, float], dict[str, float]]:
    """Stages of a group's restart, and of the whole job's."""
    with tempfile.TemporaryDirectory() as name, Supervised(Path(name), RUN, seed=0) as job:
        say("restart: a supervised job of three groups")
        job.start()
        job.await_steps(set(RUN.names), STEPS, "all train")
        job.until(lambda: bool(pick(job.events, CheckpointSaved)), "a checkpoint", BACK_S_MAX)
        one, all_groups = RUN.names[-1], RUN.names
        killed, since = _kill(job, [one])
        events = job.events[since:]
        group = _stages.group_restart(events, one, killed, _imported(job, one, killed))
        killed, since = _kill(job, all_groups)
        imported = {name: _imported(job, name, killed) for name in all_groups}
        return group, _stages.job_restart(job.events[since:], all_groups, killed, imported)


def _kill(job: Supervised, groups: Sequence[str]) -> tuple[float, int]:
    """Kills these groups at one moment and waits for their return; when that was, and how many events there were."""
    say(f"restart: kills {', '.join(groups)}")
    starts = {group: _start(job, group) for group in groups}
    since, killed = len(job.events), time.time()
    kill_tree(Hit(job.processes, groups[0], groups=tuple(groups)))
    job.until(lambda: all(_start(job, group) != starts[group] for group in groups), "they are back", BACK_S_MAX)
    job.await_steps(set(RUN.names), STEPS, "all train on")
    return killed, since


def _start(job: Supervised, group: str) -> str:
    newest = job.newest(group)
    return newest.incarnation if newest is not None else ""


def _imported(job: Supervised, group: str, after: float) -> float:
    """When the newest rank of a group had imported what it needs, as it says itself."""
    moments = [float(path.read_text()) for path in job.folder.glob(f"imported-{group}-*")]
    return min(moment for moment in moments if moment > after)
