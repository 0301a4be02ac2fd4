"""How long survivors stand when a killed group comes back, by the size of the state, beside torchft and the floor."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightkeeper.bench import _bare, _peer
from lightkeeper.bench._trainers import Trainers, local_job, say
from lightkeeper.events import read_run
from lightkeeper.events.schema import Committed, Copied, Event, Finished, GroupLost, Healed, Rejoined

GROUPS = 3
STATE_MB = (64, 256, 1024)  # parameters and the two moments of AdamW; gradients are a third of it
STEP_S = 0.5  # of timed compute, whatever the share
KILL_STEP = 5
BEFORE = 3  # steps of two groups between the recovery and the restart
AFTER = 5  # steps that are looked at after the rejoin
STEPS = 28
PEER_STEPS = KILL_STEP + BEFORE + 9
RUN_S_MAX = 150.0
VICTIM = "g2"
TARGET_S = STEP_S


def run() -> dict[str, Any]:
    """Sizes in turn: ours, torchft, and what any rejoin costs on this machine."""
    ours: dict[str, dict[str, Any]] = {}
    peer: dict[str, dict[str, Any]] = {}
    bare: dict[str, dict[str, Any]] = {}
    for state_mb in STATE_MB:
        say(f"rejoin: ours, {state_mb} MB")
        ours[str(state_mb)] = _ours(state_mb)
        say(f"rejoin: {ours[str(state_mb)]}; torchft, {state_mb} MB")
        peer[str(state_mb)] = _torchft(state_mb)
        say(f"rejoin: {peer[str(state_mb)]}; bare")
        bare[str(state_mb)] = _bare.rejoin_stall_s(state_mb, STEP_S)
        say(f"rejoin: {bare[str(state_mb)]}")
    stalls = {size: case["survivor_stall_s"] for size, case in ours.items()}
    return {
        "bench": "rejoin",
        "ours": _by_size(ours),
        "peer": _by_size(peer),
        "bare": _by_size(bare),
        "ratio": {size: round(stalls[size] / max(peer[size]["survivor_stall_s"], 1e-3), 3) for size in stalls},
        "target": {"survivor_stall_s": TARGET_S, "bits_equal": True},
        "met": max(stalls.values()) <= TARGET_S and all(case["bits_equal"] for case in ours.values()),
    }


def _by_size(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    names = list(next(iter(cases.values())))
    return {name: {size: case[name] for size, case in cases.items()} for name in names}


def _until(holds: Callable[[], bool], what: str, alive: Callable[[], bool] = lambda: True) -> None:
    end = time.monotonic() + RUN_S_MAX
    while not holds():
        if time.monotonic() > end or not alive():
            raise RuntimeError(f"rejoin: not within {RUN_S_MAX:.0f} s, or a trainer died: {what}")
        time.sleep(0.05)


# ---------------------------------------------------------------- ours


def _ours(state_mb: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_job(folder, GROUPS) as (trainers, environment):
            for slot in range(GROUPS):
                group = f"g{slot}"
                fault = {"LIGHTKEEPER_FAULT": f"kill:{VICTIM}:reduce:{KILL_STEP}"} if group == VICTIM else {}
                trainers.start(group, {**environment(group), **fault}, train, state_mb)

            def committed(step: int, *groups: str) -> bool:
                steps = {e.group: e.step for e in read_run(folder).events if isinstance(e, Committed)}
                return all(steps.get(group, -1) >= step for group in groups)

            def alive() -> bool:
                return all(process.is_alive() for name, process in trainers.processes.items() if name != VICTIM)

            _until(lambda: committed(KILL_STEP + BEFORE, "g0", "g1"), "the normal steps", alive)
            restarted_ns = time.monotonic_ns()
            trainers.start(f"{VICTIM}-again", environment(VICTIM), train, state_mb)
            trainers.result_of(GROUPS, timeout_s=RUN_S_MAX)
        return figures(read_run(folder).events, restarted_ns)


def train(state_mb: int) -> None:
    """One group with timed compute."""
    import torch

    import lightkeeper
    from lightkeeper.bench._compute import WIDTH, stack

    torch.set_num_threads(1)
    model = stack(state_mb / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager = lightkeeper.Manager(model, optimizer)
    inputs = torch.randn(1, WIDTH)
    for step in manager.steps(STEPS, GROUPS):
        optimizer.zero_grad()
        share = max(1, len(step.share()))
        for _ in step.microbatches():
            start = time.monotonic()
            (model(inputs).square().mean() / step.total).backward()
            time.sleep(max(0.0, STEP_S / share - (time.monotonic() - start)))
        optimizer.step()


def figures(events: list[Event], restarted_ns: int) -> dict[str, Any]:
    """The stall is a survivor's longest iteration from the restart to five steps after the rejoin, less its normal one.

    Three groups at work on few cores take longer than two, so the normal one is the longer of two medians: of the
    steps before the kill (three groups) and of those between the recovery and the restart (two).
    """
    rejoined = next(e for e in events if isinstance(e, Rejoined))
    if rejoined.step + AFTER >= STEPS:
        raise RuntimeError(f"rejoin: {VICTIM} came back at step {rejoined.step} of {STEPS} only")
    healed = [e for e in events if isinstance(e, Healed)][-1]
    commits = [e for e in events if isinstance(e, Committed)]
    stalls, normals, worst = [], [], []
    for group in ("g0", "g1"):
        mine = [e for e in commits if e.group == group]
        normal_s = _normal_s([(e.step, e.seconds) for e in mine if e.mono_ns < restarted_ns])
        during = [e for e in mine if e.mono_ns >= restarted_ns and e.step <= rejoined.step + AFTER]
        longest = max(during, key=lambda e: e.seconds)
        normals.append(normal_s)
        stalls.append(longest.seconds - normal_s)
        worst.append(longest.step - rejoined.step)
        series = " ".join(f"{'|' if e.step == rejoined.step else ''}{e.seconds:.2f}" for e in during)
        say(f"rejoin: {group}: normally {normal_s:.2f} s, then {series}")
    ends = {e.group: e.fingerprint for e in events if isinstance(e, Finished) and e.fingerprint}
    lost = [e.group for e in events if isinstance(e, GroupLost) and e.mono_ns < restarted_ns]
    return {
        "survivor_stall_s": round(max(stalls), 3),
        "rejoin_s": round((rejoined.mono_ns - restarted_ns) / 1e9, 3),
        "mib_per_s": round(healed.bytes / healed.seconds / (1 << 20), 1),
        "normal_s": round(max(normals), 3),
        "worst_step_from_rejoin": worst[stalls.index(max(stalls))],
        "copy_pause_s": round(max(e.pause_s for e in events if isinstance(e, Copied)), 4),
        "replayed": rejoined.step - healed.step,
        "bits_equal": len(ends) == GROUPS and len(set(ends.values())) == 1,
        "blamed": ",".join(sorted(set(lost))),
    }


def _normal_s(steps: list[tuple[int, float]]) -> float:
    three = [seconds for step, seconds in steps if 0 < step < KILL_STEP]
    two = [seconds for step, seconds in steps if step > KILL_STEP]
    return max(statistics.median(three), statistics.median(two))


# ---------------------------------------------------------------- the peer


def _torchft(state_mb: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, _peer.lighthouse() as address:
        folder = Path(name)
        trainers = Trainers(folder)
        try:
            more = {"TORCHFT_LIGHTHOUSE": address}
            for slot in range(GROUPS):
                die_at = KILL_STEP if f"g{slot}" == VICTIM else None
                arguments = (slot, PEER_STEPS, STEP_S, state_mb / 3, die_at, str(folder / f"g{slot}"))
                trainers.start(f"g{slot}", more, _peer.train, *arguments)

            def reached() -> bool:
                return any(row["after"] > KILL_STEP + BEFORE for row in _peer.read_rows(folder / "g0"))

            _until(reached, "torchft's normal steps")
            restarted = time.monotonic()
            again = f"{VICTIM}-again"
            trainers.start(again, more, _peer.train, GROUPS - 1, PEER_STEPS, STEP_S, state_mb / 3)
            results = trainers.result_of(GROUPS, timeout_s=RUN_S_MAX)
        finally:
            trainers.end()
    first = results[again][0]
    stalls, normals = [], []
    for group in ("g0", "g1"):
        rows = results[group]
        normal_s = _normal_s([(row["before"], row["seconds"]) for row in rows if row["at"] < restarted])
        during = [row for row in rows if row["at"] >= restarted and row["before"] <= first["after"] + AFTER]
        normals.append(normal_s)
        stalls.append(max(row["seconds"] for row in during) - normal_s)
        say(f"rejoin: {group}: normally {normal_s:.2f} s, then {' '.join(format(r['seconds'], '.2f') for r in during)}")
    return {
        "survivor_stall_s": round(max(stalls), 3),
        "rejoin_s": round(first["at"] - restarted, 3),
        "mib_per_s": None,
        "normal_s": round(max(normals), 3),
        "bits_equal": len({rows[-1]["digest"] for rows in results.values()}) == 1,
    }
