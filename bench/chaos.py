"""What a killing every few seconds costs four groups, beside torchft under the same killings and the same restarts."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightkeeper.bench import _peer
from lightkeeper.bench._trainers import Trainers, local_job, say, train_timed
from lightkeeper.errors import UsageError
from lightkeeper.events import read_run
from lightkeeper.events.schema import Committed, GroupLost

GROUPS = 4
MICROBATCHES = 24
MICROBATCH_S = 0.05
GRADIENT_MB = 4.0
QUIET_S = 10.0  # without a fault, at the start: what is normal
STEPS = 1_000_000  # ended by the clock
START_S_MAX = 60.0
TARGET = 0.95
PEER_TIMEOUT_S = 5.0  # as its heartbeat's: with its usual 30 or 60 s none of its steps would end between two kills
FINGERPRINT_EVERY = 10
SEED = 7
TIMED = (STEPS, MICROBATCHES, MICROBATCH_S, GRADIENT_MB)


@dataclass(frozen=True)
class Kill:
    """A trainer was killed: when (monotonic seconds), and of which group."""

    at: float
    group: str


@dataclass(frozen=True)
class Killing:
    """How often, how long and what after; see `run`."""

    interval_s: float
    minutes: float
    restart_s: float

    def done_to(self, trainers: Trainers, start: Callable[[str], None]) -> list[Kill]:
        """Kills a trainer every interval and starts its group again; who is next is the same in every call."""
        chance = random.Random(SEED)
        kills: list[Kill] = []
        for number in range(max(1, round(60 * self.minutes / self.interval_s))):
            group = f"g{chance.randrange(GROUPS)}"
            trainers.processes[group].kill()
            trainers.processes[group].join()
            kills.append(Kill(time.monotonic(), group))
            time.sleep(self.restart_s)
            start(group)
            time.sleep(max(0.0, kills[0].at + (number + 1) * self.interval_s - time.monotonic()))
        return kills


@dataclass(frozen=True)
class Step:
    """An iteration of one group: the step that it finished, or threw away.

    Attributes:
        at: when it ended (monotonic seconds).
        seconds: how long it took.
        index: of the step.
        done: microbatches by which it brought the job forward, of all groups together; 0 if it was thrown away.
    """

    group: str
    at: float
    seconds: float
    index: int
    done: float


def run(interval: float = 15.0, minutes: float = 5.0, restart: float = 3.0) -> dict[str, Any]:
    """The same kills for both; the first falls after ten quiet seconds.

    Args:
        interval: seconds between two kills.
        minutes: how long the killing goes on.
        restart: seconds from a kill to the start of the group's next process: what importing torch takes.
    """
    if restart >= interval:
        raise UsageError(
            f"--restart {restart:g} is not below --interval {interval:g}: a group must be back to be killed"
        )
    say(f"chaos: ours, {GROUPS} groups, a kill every {interval:g} s for {minutes:g} minutes")
    killing = Killing(interval, minutes, restart)
    ours = _ours(killing)
    say(f"chaos: {ours}; torchft")
    peer = _torchft(killing)
    met = ours["steps_in_time"] >= TARGET and ours["goodput"] >= peer["goodput"] and ours["bits_equal"]
    return {
        "bench": "chaos",
        "ours": ours,
        "peer": peer,
        "ratio": {"goodput": round(ours["goodput"] / peer["goodput"], 3) if peer["goodput"] else None},
        "target": {"steps_in_time": TARGET, "bits_equal": True},
        "met": met,
    }


def figures(steps: Sequence[Step], kills: Sequence[Kill], ended: float) -> dict[str, Any]:
    """The named figures.

    `steps_in_time`: of the survivors' steps, the share finished within twice the normal time (the median of the quiet
    seconds before the first kill); what is thrown away is not finished. The first step of a group that was started
    again is no survivor's. `goodput`: microbatches by which the job came forward after the first kill, as a share of
    what it would have done in that time without a fault.
    """
    first = kills[0].at
    normal_s = statistics.median(step.seconds for step in steps if first - QUIET_S <= step.at < first)
    started = {(kill.group, kill.at) for kill in kills}
    survivors: list[Step] = []
    forward: dict[int, float] = {}
    for step in sorted((step for step in steps if first <= step.at <= ended), key=lambda step: step.at):
        forward[step.index] = max(step.done, forward.get(step.index, 0.0))
        back = {start for start in started if start[0] == step.group and start[1] < step.at}
        started -= back
        if not back:
            survivors.append(step)
    in_time = [step for step in survivors if step.done and step.seconds <= 2 * normal_s]
    return {
        "steps_in_time": round(len(in_time) / len(survivors), 4),
        "goodput": round(sum(forward.values()) * normal_s / (MICROBATCHES * (ended - first)), 4),
        "normal_s": round(normal_s, 4),
        "longest_s": round(max(step.seconds for step in survivors), 3),
        "kills": len(kills),
    }


# ---------------------------------------------------------------- ours


def _ours(killing: Killing) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_job(folder, GROUPS) as (trainers, environment):

            def start(group: str) -> None:
                more = {"LIGHTKEEPER_FINGERPRINT_EVERY": str(FINGERPRINT_EVERY)}
                trainers.start(group, {**environment(group), **more}, train_timed, *TIMED)

            for slot in range(GROUPS):
                start(f"g{slot}")
            _wait_for_a_step(lambda: any(isinstance(e, Committed) for e in read_run(folder).events))
            time.sleep(QUIET_S)
            kills = killing.done_to(trainers, start)
            ended = time.monotonic()
        events = read_run(folder).events
    commits = [e for e in events if isinstance(e, Committed)]
    steps = [Step(e.group, e.mono_ns / 1e9, e.seconds, e.step, MICROBATCHES) for e in commits if e.live]
    digests = defaultdict(set)
    for event in commits:
        if event.fingerprint:
            digests[event.step].add(event.fingerprint)
    lost = [e.group for e in events if isinstance(e, GroupLost)]
    return {
        **figures(steps, kills, ended),
        "bits_equal": bool(digests) and all(len(found) == 1 for found in digests.values()),
        "blamed_rightly": lost[: len(kills)] == [kill.group for kill in kills],
        "steps_lost": 1 + max(step.index for step in steps) - len({step.index for step in steps}),
    }


# ---------------------------------------------------------------- the peer


def _torchft(killing: Killing) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, _peer.lighthouse() as address:
        folder = Path(name)
        trainers = Trainers(folder)
        starts: list[tuple[str, Path]] = []

        def start(group: str) -> None:
            path = folder / f"{group}-{len(starts)}.jsonl"
            starts.append((group, path))
            compute_s = MICROBATCH_S * MICROBATCHES / GROUPS
            more = {"TORCHFT_LIGHTHOUSE": address}
            trainers.start(
                group, more, _peer.train, int(group[1:]), STEPS, compute_s, GRADIENT_MB, None, str(path), PEER_TIMEOUT_S
            )

        try:
            for slot in range(GROUPS):
                start(f"g{slot}")
            _wait_for_a_step(
                lambda: any(row["members"] == GROUPS for _, path in starts for row in _peer.read_rows(path))
            )
            time.sleep(QUIET_S)
            kills = killing.done_to(trainers, start)
            ended = time.monotonic()
        finally:
            trainers.end()
        rows = [(group, row) for group, path in starts for row in _peer.read_rows(path)]
    steps = [
        Step(
            group, row["at"], row["seconds"], row["before"],
            MICROBATCHES * row["members"] / GROUPS if row["after"] > row["before"] else 0.0,
        )
        for group, row in rows
    ]  # fmt: skip
    return figures(steps, kills, ended)


def _wait_for_a_step(there: Callable[[], bool]) -> None:
    until = time.monotonic() + START_S_MAX
    while not there():
        if time.monotonic() > until:
            raise RuntimeError(f"chaos: no step within {START_S_MAX:.0f} s")
        time.sleep(0.1)
