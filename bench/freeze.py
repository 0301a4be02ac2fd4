"""How long survivors stand when one of three groups is frozen, before its reduce and inside it, beside torchft."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lightkeeper.bench import _peer
from lightkeeper.bench._trainers import Trainers, local_job, say, train_timed
from lightkeeper.bench.kill import (
    FAULT_STEP,
    GRADIENT_MB,
    GROUPS,
    MICROBATCH_S,
    MICROBATCHES,
    STEPS,
    TIMED,
    VICTIM,
    peer_figures,
    survivors,
)
from lightkeeper.events import read_run

PHASES = ("compute", "reduce")
LEASE_S = 2.0  # the lighthouse's default
TARGET_S = LEASE_S + 0.5


def run() -> dict[str, Any]:
    """SIGSTOP of the trainer as it begins to compute a step, then inside a reduce; the same of torchft's."""
    ours: dict[str, Any] = {}
    peer: dict[str, Any] = {}
    for phase in PHASES:
        say(f"freeze: ours, in {phase}")
        ours[phase] = _ours(phase)
        say(f"freeze: {ours[phase]}; torchft, in {phase}")
        peer[phase] = _torchft(phase)
    stall_s = max(case["survivor_stall_s"] for case in ours.values())
    peer_s = max(case["survivor_stall_s"] for case in peer.values())
    worst = {
        name: max(case[name] for case in ours.values())
        for name in ("steps_redone", "microbatches_recomputed_by_survivors", "detected_s")
    }
    right = all(case["fault_phase"] == phase and case["blamed"] == VICTIM for phase, case in ours.items())
    clean = not worst["steps_redone"] and not worst["microbatches_recomputed_by_survivors"]
    return {
        "bench": "freeze",
        "ours": {"survivor_stall_s": stall_s, **worst, "cases": ours},
        "peer": {"survivor_stall_s": peer_s, "cases": peer},
        "ratio": {phase: ours[phase]["survivor_stall_s"] / peer[phase]["survivor_stall_s"] for phase in PHASES},
        "target": {"survivor_stall_s": TARGET_S, "steps_redone": 0, "microbatches_recomputed_by_survivors": 0},
        "met": stall_s <= TARGET_S and clean and right,
    }


def _ours(phase: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_job(folder, GROUPS) as (trainers, environment):
            for slot in range(GROUPS):
                group = f"g{slot}"
                fault = {"LIGHTKEEPER_FAULT": f"freeze:{VICTIM}:{phase}:{FAULT_STEP}"} if group == VICTIM else {}
                trainers.start(group, {**environment(group), **fault}, train_timed, *TIMED)
            trainers.result_of(GROUPS - 1, timeout_s=120)
        return survivors(read_run(folder).events)


# ---------------------------------------------------------------- the peer


def _torchft(phase: str) -> dict[str, Any]:
    """Its survivors, as `kill` measures them."""
    compute_s = MICROBATCH_S * MICROBATCHES / GROUPS
    with tempfile.TemporaryDirectory() as name, _peer.lighthouse() as address:
        trainers = Trainers(Path(name))
        try:
            for slot in range(GROUPS):
                freeze_at = (phase, FAULT_STEP) if f"g{slot}" == VICTIM else None
                more = {"TORCHFT_LIGHTHOUSE": address}
                arguments = (slot, STEPS, compute_s, GRADIENT_MB, None, "", _peer.TIMEOUT_S, 0, freeze_at)
                trainers.start(f"g{slot}", more, _peer.train, *arguments)
            results = trainers.result_of(GROUPS - 1, timeout_s=300)
        finally:
            trainers.end()
    return peer_figures(results)
