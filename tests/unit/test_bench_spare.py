"""What `bench spare` makes of an event log."""

from __future__ import annotations

import pytest

from lightkeeper.bench.spare import BEFORE, FAULT_STEP, figures
from lightkeeper.events.schema import Committed, Event, FaultInjected, Finished, GroupLost

SHARES = {"g0": (0, 1, 2), "g1": (3, 4, 5), "g2": (6, 7, 8), "g3": (9, 10, 11), "g4": ()}
HEIR = {**SHARES, "g4": SHARES["g2"]}


def commit(group: str, step: int, shares: dict[str, tuple[int, ...]], at: float) -> Committed:
    return Committed(
        group=group, incarnation=f"{group}-1", step=step, epoch=1, total=12, microbatches=shares[group],
        seconds=0.4, mono_ns=round(at * 1e9),
    )  # fmt: skip


def run(after: dict[str, tuple[int, ...]]) -> list[Event]:
    """g2 is killed at second 100; the step is committed 0.7 s later."""
    early = [commit(g, s, SHARES, s) for s in range(FAULT_STEP - BEFORE, FAULT_STEP) for g in SHARES]
    fault = FaultInjected(fault="kill", phase="reduce", step=FAULT_STEP, group="g2", mono_ns=100 * 10**9)
    late = [commit(g, FAULT_STEP, after, 100.7) for g in SHARES if g != "g2"]
    ends = [Finished(step=30, group=g, fingerprint="f") for g in SHARES if g != "g2"]
    return [*early, fault, GroupLost(group="g2", cause="killed", detected_by="manager"), *late, *ends]


def test_the_takeover_is_from_the_kill_to_the_commit_with_the_spares_work() -> None:
    found = figures(run(HEIR))
    assert (found["takeover_s"], found["step_s"], found["beyond_a_step_s"]) == (0.7, 0.4, pytest.approx(0.3))
    assert (found["promoted"], found["work_after"], found["blamed"], found["bits_equal"]) == ("g4", 3, "g2", True)


def test_a_spare_that_did_nothing_is_no_takeover() -> None:
    with pytest.raises(RuntimeError, match="no spare worked in step 15"):
        figures(run(SHARES))
