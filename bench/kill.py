"""How long survivors stand when one of three groups is killed inside a reduce, beside torchft."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from lightkeeper.bench import _peer
from lightkeeper.bench._trainers import Trainers, local_job, say, train_timed
from lightkeeper.events import read_run
from lightkeeper.events.schema import Committed, Event, FaultInjected, GroupLost

GROUPS = 3
MICROBATCHES = 12
MICROBATCH_S = 0.05
GRADIENT_MB = 4.0
STEPS = 30
FAULT_STEP = 15
BEFORE = 10
TARGET_S = 0.3
VICTIM = "g2"
TIMED = (STEPS, MICROBATCHES, MICROBATCH_S, GRADIENT_MB)


def run() -> dict[str, Any]:
    """SIGKILL of the trainer alone, then of the group's whole process tree; then torchft's survivors."""
    ours: dict[str, Any] = {}
    for kind in ("kill", "kill-tree"):
        say(f"kill: ours, {kind}")
        ours[kind] = _ours(kind)
    say("kill: torchft")
    peer = _torchft()
    stall_s = max(case["survivor_stall_s"] for case in ours.values())
    clean = all(
        case["steps_redone"] == 0 and case["microbatches_recomputed_by_survivors"] == 0 for case in ours.values()
    )
    return {
        "bench": "kill",
        "ours": {"survivor_stall_s": stall_s, **_worst(ours), "cases": ours},
        "peer": peer,
        "ratio": stall_s / peer["survivor_stall_s"],
        "target": {
            "survivor_stall_s": TARGET_S,
            "steps_redone": 0,
            "microbatches_recomputed_by_survivors": 0,
        },
        "met": stall_s <= TARGET_S and clean and all(case["fault_phase"] == "reduce" for case in ours.values()),
    }


def _worst(cases: dict[str, Any]) -> dict[str, Any]:
    names = ("steps_redone", "microbatches_recomputed_by_survivors", "detected_s", "inherited_s")
    return {name: max(case[name] for case in cases.values()) for name in names}


# ---------------------------------------------------------------- ours


def _ours(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_job(folder, GROUPS) as (trainers, environment):
            for slot in range(GROUPS):
                group = f"g{slot}"
                fault = {"LIGHTKEEPER_FAULT": f"{kind}:{VICTIM}:reduce:{FAULT_STEP}"} if group == VICTIM else {}
                trainers.start(group, {**environment(group), **fault}, train_timed, *TIMED)
            trainers.result_of(GROUPS - 1, timeout_s=120)
        return survivors(read_run(folder).events)


def survivors(events: list[Event]) -> dict[str, Any]:
    """The named figures, from the event log.

    The stall is a survivor's longest iteration from the fault on, minus its median of the ten steps before, minus
    what it inherited: (new share - old share) times the median microbatch time of those ten steps.
    """
    fault = next(event for event in events if isinstance(event, FaultInjected))
    lost = next(event for event in events if isinstance(event, GroupLost) and event.group == VICTIM)
    stalls, inherited, recomputed, missing = [], [], 0, 0
    for group in sorted({e.group for e in events if isinstance(e, Committed)} - {VICTIM}):
        steps = {e.step: e for e in events if isinstance(e, Committed) and e.group == group}
        before = [steps[i] for i in range(FAULT_STEP - BEFORE, FAULT_STEP)]
        normal_s = statistics.median(e.seconds for e in before)
        microbatch_s = statistics.median((e.seconds - e.wait_s) / len(e.microbatches) for e in before)
        old_share = len(before[-1].microbatches)
        after = [e for i, e in steps.items() if i >= FAULT_STEP]
        worst = max(after, key=lambda e: e.seconds - (len(e.microbatches) - old_share) * microbatch_s)
        inherited_s = (len(worst.microbatches) - old_share) * microbatch_s
        stalls.append(worst.seconds - normal_s - inherited_s)
        inherited.append(inherited_s)
        recomputed += sum((e.computed or 0) - len(e.microbatches) for e in after)
        missing += STEPS - len(steps)
    return {
        "survivor_stall_s": round(max(stalls), 4),
        "steps_redone": missing,
        "microbatches_recomputed_by_survivors": recomputed,
        "detected_s": round((lost.mono_ns - fault.mono_ns) / 1e9, 4),
        "inherited_s": round(max(inherited), 4),
        "fault_phase": fault.phase,
        "blamed": lost.group,
        "detected_by": lost.detected_by,
    }


# ---------------------------------------------------------------- the peer


def _torchft() -> dict[str, Any]:
    compute_s = MICROBATCH_S * MICROBATCHES / GROUPS
    with tempfile.TemporaryDirectory() as name, _peer.lighthouse() as address:
        trainers = Trainers(Path(name))
        try:
            for slot in range(GROUPS):
                die_at = FAULT_STEP if f"g{slot}" == VICTIM else None
                more = {"TORCHFT_LIGHTHOUSE": address}
                trainers.start(f"g{slot}", more, _peer.train, slot, STEPS, compute_s, GRADIENT_MB, die_at)
            results = trainers.result_of(GROUPS - 1, timeout_s=180)
        finally:
            trainers.end()
    return peer_figures(results)


def peer_figures(results: dict[str, Any]) -> dict[str, Any]:
    """The named figures of torchft's survivors.

    Args:
        results: by survivor, its rows as `_peer.train` writes them.
    """
    stalls, redone = [], 0
    for rows in results.values():
        normal_s = statistics.median(
            row["seconds"] for row in rows if FAULT_STEP - BEFORE <= row["before"] < FAULT_STEP
        )
        after = [row for row in rows if row["before"] >= FAULT_STEP]
        stalls.append(max(row["seconds"] for row in after) - normal_s)
        redone = max(redone, sum(row["before"] == row["after"] for row in after))
    return {"survivor_stall_s": round(max(stalls), 4), "steps_redone": redone}
