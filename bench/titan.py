"""What torchtitan's steps cost as replica groups, and what a SIGKILL costs them, beside HSDP and torchft."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lightkeeper.bench import _titan_peer
from lightkeeper.bench._titan import tell
from lightkeeper.bench._trainers import TrainerFailed, say
from lightkeeper.demo.job import LocalJob
from lightkeeper.errors import UsageError
from lightkeeper.events import read_run
from lightkeeper.events.lineage import pick
from lightkeeper.events.schema import Committed, Event, GroupLost, Recovered, Rejoined
from lightkeeper.events.summary import rejoins, steps_lost

GROUPS = ("g0", "g1")
VICTIM = "g1"
WARM_STEPS, BLOCK_STEPS, BLOCKS = 8, 10, 8
ONE_GROUP_STEPS = 6
KILL_STEP = 20  # the victim is killed somewhere in it
BEFORE = 10  # steps of which a usual one is the median
FINGERPRINT_EVERY = 5
AFTER = FINGERPRINT_EVERY + 1  # steps after the rejoin
RESTART_AFTER_S = _titan_peer.RESTART_AFTER_S
ENDLESS = 1_000_000
RUN_S_MAX = 900.0
POLL_S = 0.1  # in the step bench nobody runs while the bench decides whose turn it is
TARGET_RATIO, TARGET_COMMIT_S = 1.02, 1.0
MODULE = "lightkeeper.bench._titan"
ALONE = {"OMP_NUM_THREADS": "1", "LIGHTKEEPER_WARM": "0"}

T = TypeVar("T")


def run(peer: str = "") -> dict[str, Any]:
    """Step times in alternating blocks, one group's bits, a kill and a return; then torchft's, from the folder `peer`.

    Raises:
        UsageError: torchtitan is not installed, or the folder is not what it should be.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise UsageError("bench titan needs torchtitan: pip install 'lightkeeper[torchtitan]'")
    if peer:
        _titan_peer.check(Path(peer))
    say("titan: two groups and HSDP on two ranks, in turns")
    step = _steps()
    say(f"titan: {step}; one group, bits")
    equal = _one_group_is_bit_equal()
    say("titan: a group is killed, and started again")
    kill = _kill()
    say(f"titan: {kill}")
    torchft = _torchft(Path(peer).resolve()) if peer else {}
    ratios = {name: round(kill["kill_to_commit_s"] / case["kill_to_commit_s"], 3) for name, case in torchft.items()}
    target = {"step": TARGET_RATIO, "kill_to_commit_s": TARGET_COMMIT_S, "bits_equal": True}
    met = step["ratio"] <= TARGET_RATIO and kill["kill_to_commit_s"] <= TARGET_COMMIT_S
    return {
        "bench": "titan",
        "ours": {
            "step_s": step["ours_s"],
            "step_ratio_quartiles": step["quartiles"],
            "bits_equal": {"one group": equal, "two groups": step["bits_equal"]},
            **{name: value for name, value in kill.items() if name != "step_s"},
        },
        "peer": {
            "step_s": step["plain_s"],
            **(torchft or {"torchft": "left out: --peer DIR names the folder of its programs"}),
        },
        "ratio": {"step": step["ratio"], **{f"kill to commit, {name}": ratio for name, ratio in ratios.items()}},
        "target": target,
        "met": met and equal and kill["steps_lost"] == 0 and kill["bits_equal"] and kill["blamed"] == VICTIM,
    }


# ---------------------------------------------------------------- without a fault


def _steps() -> dict[str, Any]:
    """Two groups of one rank, and HSDP with two replicas: both are there, and one of them runs."""
    last = WARM_STEPS + BLOCKS * BLOCK_STEPS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _groups(folder, GROUPS, last, WARM_STEPS, BLOCK_STEPS) as job:
            replicas = ["--parallelism.data_parallel_replicate_degree", "2"]
            replicas += ["--parallelism.data_parallel_shard_degree", "1"]
            with _plain(folder, len(GROUPS), last, WARM_STEPS, BLOCK_STEPS, replicas) as healthy:

                def told(kind: str, number: int) -> list[list[float]]:
                    names = [f"{kind}-{i}-{number}" for i in range(len(GROUPS))]
                    return _until(lambda: _read(folder, names), job, healthy)

                medians = _take_turns(folder, told)
                names = [f"digest-{kind}-0" for kind in ("ours", "plain")]
                digests = _until(lambda: _read(folder, names), job, healthy)
    ratios = [ours / plain for ours, plain in zip(medians["ours"], medians["plain"], strict=True)]
    return {
        "ours_s": round(statistics.median(medians["ours"]), 4),
        "plain_s": round(statistics.median(medians["plain"]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(quartile, 3) for quartile in statistics.quantiles(ratios)],
        "bits_equal": digests[0] == digests[1],
    }


def _take_turns(folder: Path, told: Callable[[str, int], list[list[float]]]) -> dict[str, list[float]]:
    """Median step of each block; who goes first changes from block to block."""
    medians: dict[str, list[float]] = {"ours": [], "plain": []}
    for kind in medians:
        told(kind, 0)
    for number in range(1, BLOCKS + 1):
        for kind in sorted(medians, reverse=number % 2 == 0):
            for i in range(len(GROUPS)):
                tell(folder, f"go-{kind}-{i}-{number}", True)
            seconds = told(kind, number)
            medians[kind].append(statistics.median(seconds[0]))
    for kind in medians:
        for i in range(len(GROUPS)):
            tell(folder, f"go-{kind}-{i}-{BLOCKS + 1}", True)
    return medians


def _one_group_is_bit_equal() -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _groups(folder, GROUPS[:1], ONE_GROUP_STEPS) as job, _plain(folder, 1, ONE_GROUP_STEPS) as healthy:
            digests = _until(lambda: _read(folder, ["digest-ours-0", "digest-plain-0"]), job, healthy)
    return bool(digests[0] == digests[1])


def _options(folder: Path, kind: str, number: int, last: int, warm: int = 0, block: int = 0) -> str:
    return json.dumps(
        {"plain": kind == "plain", "name": f"{kind}-{number}", "folder": str(folder), "warm": warm, "block": block,
         "last": last}
    )  # fmt: skip


@contextmanager
def _groups(folder: Path, groups: tuple[str, ...], last: int, warm: int = 0, block: int = 0) -> Iterator[LocalJob]:
    """A lighthouse and these groups of one rank."""
    with LocalJob(folder, groups, settings={"fingerprint-every": str(0 if block else FINGERPRINT_EVERY)}) as job:
        job.start_lighthouse()
        for number, group in enumerate(groups):
            job.start_group(group, _command(folder, number, last, warm, block), ALONE)
        yield job


def _command(folder: Path, number: int, last: int, warm: int = 0, block: int = 0) -> list[str]:
    return ["-m", MODULE, _options(folder, "ours", number, last, warm, block)]


@contextmanager
def _plain(
    folder: Path, ranks: int, last: int, warm: int = 0, block: int = 0, more: Sequence[str] = ()
) -> Iterator[Callable[[], str]]:
    """torchtitan alone on so many ranks; gives what says, in words, whether one has failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            words = [sys.executable, "-m", MODULE, _options(folder, "plain", rank, last, warm, block), *more]
            own = {**clean, **meet, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"plain-{rank}.txt").open("wb") as output:
                children.append(subprocess.Popen(words, env=own, stdout=output, stderr=subprocess.STDOUT))

        def failed() -> str:
            bad = [rank for rank, child in enumerate(children) if child.poll() not in (None, 0)]
            return (folder / f"plain-{bad[0]}.txt").read_text(errors="replace")[-2000:] if bad else ""

        yield failed
    finally:
        for child in children:
            child.kill()
            child.wait()


# ---------------------------------------------------------------- a kill


def _kill() -> dict[str, Any]:
    """SIGKILL of all processes of one of two groups; a second later the same line starts it again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _groups(folder, GROUPS, ENDLESS) as job:

            def seen(kind: type[Event], holds: Callable[[Any], bool]) -> Any:
                return next((e for e in read_run(folder).events if isinstance(e, kind) and holds(e)), None)

            _until(lambda: seen(Committed, lambda e: e.group == "g0" and e.step >= KILL_STEP), job)
            launcher = psutil.Process(job.children[VICTIM].pid)
            victims = [launcher, *launcher.children(recursive=True)]
            killed_ns = time.monotonic_ns()
            for process in victims:
                process.kill()
            job.children[VICTIM].wait()
            time.sleep(RESTART_AFTER_S)
            job.start_group(VICTIM, _command(folder, 1, ENDLESS), ALONE)
            back = _until(lambda: seen(Rejoined, lambda e: e.group == VICTIM and e.mono_ns > killed_ns), job)
            last = back.step + AFTER

            def past(group: str) -> bool:
                return seen(Committed, lambda e: e.group == group and e.step >= last) is not None

            _until(lambda: all(map(past, GROUPS)) or None, job)
            return figures(read_run(folder).events, killed_ns)


def figures(events: Sequence[Event], killed_ns: int) -> dict[str, Any]:
    """The named figures, from the event log.

    Args:
        events: of the run.
        killed_ns: when the victim was killed, monotonic nanoseconds.
    """
    survivor = [e for e in pick(events, Committed) if e.group != VICTIM and e.rank == 0]
    before = [e.seconds for e in survivor if e.mono_ns <= killed_ns][-BEFORE:]
    first = next(e for e in survivor if e.mono_ns > killed_ns)
    lost = pick(events, GroupLost)
    recovered = [e.stall_s for e in pick(events, Recovered) if e.group != VICTIM]
    back = next(one for one in rejoins(events) if one.group == VICTIM)
    longest = max(back.survivors, key=lambda stall: stall.longest_s)
    commit_s, step_s = (first.mono_ns - killed_ns) / 1e9, statistics.median(before)
    return {
        "step_s": round(step_s, 4),
        "kill_to_commit_s": round(commit_s, 3),
        "microbatches_inherited": len(first.microbatches) - 1,
        "stood_in_recovery_s": round(max(recovered), 4) if recovered else None,
        "detected_s": round((lost[0].mono_ns - killed_ns) / 1e9, 4),
        "rejoin_longest_step_s": round(longest.longest_s, 3),
        "rejoin_over_usual": round(longest.longest_s / longest.normal_s, 2),
        "restart_to_commit_s": round(back.after_s, 2),
        "steps_lost": steps_lost(events).value,
        "bits_equal": _bits_equal(events, back.step),
        "blamed": ",".join(sorted({e.group for e in lost})),
    }


def _bits_equal(events: Sequence[Event], rejoined: int) -> bool:
    """Whether no two fingerprints of a step differ, and both groups have one after the return: the run has no end."""
    seen: dict[int, dict[str, str]] = {}
    for commit in pick(events, Committed):
        if commit.fingerprint:
            seen.setdefault(commit.step, {})[commit.group] = commit.fingerprint
    after = [by_group for step, by_group in seen.items() if step >= rejoined and len(by_group) == len(GROUPS)]
    return bool(after) and all(len(set(by_group.values())) == 1 for by_group in seen.values())


def _torchft(folder: Path) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for config in _titan_peer.CONFIGS:
            say(f"titan: torchft, {config}")
            found[config] = _titan_peer.run(folder, Path(name) / config, config)
            say(f"titan: {found[config]}")
    return found


# ---------------------------------------------------------------- waiting


def _read(folder: Path, names: Sequence[str]) -> list[Any] | None:
    """What these files hold, once all are there."""
    paths = [folder / name for name in names]
    return [json.loads(path.read_text()) for path in paths] if all(path.exists() for path in paths) else None


def _until(found: Callable[[], T | None], job: LocalJob, failed: Callable[[], str] = lambda: "") -> T:
    """What is looked for, once it is there.

    Raises:
        TrainerFailed: if a process failed, or time ran out.
    """
    end = time.monotonic() + RUN_S_MAX
    while (value := found()) is None:
        bad = job.failed()
        words = job.output(bad)[-2000:] if bad else failed()
        if words or time.monotonic() > end:
            raise TrainerFailed(words or "titan: time ran out")
        time.sleep(POLL_S)
    return value
