"""How soon a spare works in the place of a killed group, beside torchft's FIXED_WITH_SPARES."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightkeeper.bench import _peer
from lightkeeper.bench._trainers import Trainers, local_job, say, train_timed
from lightkeeper.events import read_run
from lightkeeper.events.lineage import pick
from lightkeeper.events.schema import Committed, Event, FaultInjected, Finished, GroupLost
from lightkeeper.events.summary import steps_lost

MEMBERS, SPARES = 4, 1
GROUPS = MEMBERS + SPARES
MICROBATCHES = 12
MICROBATCH_S = 0.1
GRADIENT_MB = 4.0
STEPS = 30
FAULT_STEP = 15
BEFORE = 10  # steps of which a normal one is the median
VICTIM, SPARE = "g2", "g4"
TARGET_S = 0.5  # and one step
RUN_S_MAX = 180.0
PEER_TIMEOUT_S = 30.0
TIMED = (STEPS, MICROBATCHES, MICROBATCH_S, GRADIENT_MB)


def run() -> dict[str, Any]:
    """SIGKILL of a worker inside a reduce: until the next commit that has the spare's work in it."""
    say(f"spare: ours, {MEMBERS} members and {SPARES} spare")
    ours = _ours()
    say(f"spare: {ours}; torchft")
    peer = _torchft()
    say(f"spare: {peer}")
    met = ours["beyond_a_step_s"] <= TARGET_S and ours["steps_lost"] == 0 and ours["bits_equal"]
    return {
        "bench": "spare",
        "ours": ours,
        "peer": peer,
        "ratio": round(ours["takeover_s"] / peer["takeover_s"], 4),
        "target": {"beyond_a_step_s": TARGET_S, "steps_lost": 0, "bits_equal": True},
        "met": met and ours["promoted"] == SPARE and ours["blamed"] == VICTIM,
    }


# ---------------------------------------------------------------- ours


def _ours() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_job(folder, GROUPS) as (trainers, environment):
            for slot in range(GROUPS):
                group = f"g{slot}"
                more = {"LIGHTKEEPER_SPARES": str(SPARES)}
                if group == VICTIM:
                    more["LIGHTKEEPER_FAULT"] = f"kill:{VICTIM}:reduce:{FAULT_STEP}"
                trainers.start(group, {**environment(group), **more}, train_timed, *TIMED)
            trainers.result_of(GROUPS - 1, timeout_s=RUN_S_MAX)
        return figures(read_run(folder).events)


def figures(events: Sequence[Event]) -> dict[str, Any]:
    """From the SIGKILL to the commit of that step by the group that was a spare until then; from the event log.

    Raises:
        RuntimeError: if no group that did nothing before worked in that step.
    """
    fault = pick(events, FaultInjected)[0]
    by_group: dict[str, dict[int, Committed]] = {}
    for commit in pick(events, Committed):
        by_group.setdefault(commit.group, {})[commit.step] = commit
    idle = [g for g, steps in by_group.items() if not any(steps[s].microbatches for s in steps if s < fault.step)]
    promoted = [group for group in idle if fault.step in by_group[group] and by_group[group][fault.step].microbatches]
    if not promoted:
        raise RuntimeError(f"spare: no spare worked in step {fault.step}")
    commit = by_group[promoted[0]][fault.step]
    others = [group for group in by_group if group not in (fault.group, promoted[0])]
    before = [by_group[g][s].seconds for g in others for s in range(fault.step - BEFORE, fault.step)]
    step_s, takeover_s = statistics.median(before), (commit.mono_ns - fault.mono_ns) / 1e9
    ends = {e.group: e.fingerprint for e in pick(events, Finished) if e.fingerprint}
    return {
        "takeover_s": round(takeover_s, 4),
        "step_s": round(step_s, 4),
        "beyond_a_step_s": round(takeover_s - step_s, 4),
        "steps_lost": steps_lost(events).value,
        "promoted": promoted[0],
        "work_after": len(commit.microbatches),
        "blamed": ",".join(sorted({lost.group for lost in pick(events, GroupLost)})),
        "bits_equal": len(ends) == GROUPS - 1 and len(set(ends.values())) == 1,
    }


# ---------------------------------------------------------------- the peer


def _torchft() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, _peer.lighthouse() as address:
        trainers = Trainers(Path(name))
        try:
            for slot in range(GROUPS):
                die_at, rows_to = FAULT_STEP if f"g{slot}" == VICTIM else None, str(Path(name) / f"g{slot}")
                compute_s = MICROBATCH_S * MICROBATCHES / MEMBERS
                more = (die_at, rows_to, PEER_TIMEOUT_S, MEMBERS)
                trainers.start(
                    f"g{slot}", {"TORCHFT_LIGHTHOUSE": address}, _peer.train, slot, STEPS, compute_s, GRADIENT_MB, *more
                )
            results = trainers.result_of(GROUPS - 1, timeout_s=RUN_S_MAX)
        finally:
            trainers.end()
        killed_s = float((Path(name) / f"{VICTIM}.killed").read_text())
    rows = results[SPARE]
    if any(row["works"] for row in rows if row["at"] < killed_s):
        raise RuntimeError(f"spare: torchft's {SPARE} was no spare")
    after = [row for row in rows if row["at"] >= killed_s]
    first = next(row for row in after if row["works"] and row["after"] > row["before"])
    steps = [row["seconds"] for row in results["g0"] if FAULT_STEP - BEFORE <= row["before"] < FAULT_STEP]
    takeover_s, step_s = first["at"] - killed_s, statistics.median(steps)
    return {
        "takeover_s": round(takeover_s, 4),
        "step_s": round(step_s, 4),
        "beyond_a_step_s": round(takeover_s - step_s, 4),
        "steps_lost": sum(row["after"] == row["before"] for row in after),
        "promoted": SPARE,
    }
