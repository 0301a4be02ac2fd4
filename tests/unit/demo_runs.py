"""Runs of the demo as lists of events, written by hand."""

from __future__ import annotations

from lightkeeper.demo.options import DemoOptions
from lightkeeper.events import schema
from lightkeeper.events.schema import Activated, Committed, Event, FaultInjected, GroupLost, Recovered

STEPS, FAULT_STEP, BACK_STEP = 12, 4, 8
LAST = STEPS - 1
BEFORE = {"g0": (0, 3), "g1": (1, 4), "g2": (2, 5)}
AFTER = {"g0": (0, 3, 1), "g2": (2, 5, 4)}
BACK = {"g0": (0, 3, 1), "g1": (), "g2": (2, 5, 4)}
OPTIONS = DemoOptions(groups=3, steps=STEPS, microbatches=6)


def commits(
    step: int, shares: dict[str, tuple[int, ...]], epoch: int, start: int = 1, live: bool = True
) -> list[Event]:
    return [
        Committed(
            step=step,
            epoch=epoch,
            group=group,
            incarnation=f"{group}-{start if group == 'g1' else 1}",
            live=live,
            process=f"rank {group}/0",
            host="h",
            mono_ns=(step + 1) * 10**9,
            total=6,
            microbatches=share,
            computed=len(share),
            counted=6,
            seconds=1.0,
            wait_s=0.1,
            loss=4.0 - step / 10,
            tokens=512.0,
            fingerprint=f"f{step}",
        )
        for group, share in shares.items()
    ]


def reference_run() -> list[Event]:
    members = ("g0", "g1", "g2")
    events: list[Event] = [schema.Joined(group=group) for group in members]
    events.append(Activated(epoch=1, first_step=0, members=members, shares=BEFORE))
    for step in range(STEPS):
        events += commits(step, BEFORE, 1)
    return events


def faulty_run() -> list[Event]:
    events = [event for event in reference_run() if not isinstance(event, Committed) or event.step < FAULT_STEP]
    at = FAULT_STEP * 10**9
    hit = {"group": "g1", "incarnation": "g1-1", "host": "h"}
    events += [
        FaultInjected(fault="kill", phase="reduce", step=FAULT_STEP, target="rank g1/0", mono_ns=at + 10**8, **hit),
        GroupLost(cause="signal 9", detected_by="stream", mono_ns=at + 2 * 10**8, **hit),
        Activated(epoch=2, first_step=FAULT_STEP, members=("g0", "g2"), shares=AFTER, cause="g1 lost"),
    ]
    events += [Recovered(step=FAULT_STEP, epoch=2, group=group, further=AFTER[group][2:]) for group in AFTER]
    for step in range(FAULT_STEP, STEPS):
        events += commits(step, AFTER, 2)
    return events


def healed_run() -> list[Event]:
    """g1 is started again at 5.2 s and is a member from step 8 on."""
    events = [e for e in faulty_run() if not isinstance(e, Committed) or e.step < BACK_STEP]
    hit, second = ({"group": "g1", "incarnation": f"g1-{start}", "host": "h"} for start in (1, 2))
    at = 10**9
    events += [
        schema.ProcessStarted(process="manager g1", **{**hit, "mono_ns": 0}),
        schema.ProcessEnded(exit_code=137, process="manager g1", **{**hit, "mono_ns": int(5.1 * at)}),
        schema.ProcessStarted(process="manager g1", **{**second, "mono_ns": int(5.2 * at)}),
        schema.Joined(mono_ns=6 * at, **second),
        schema.Healing(step=7, mono_ns=6 * at, **second),
        *(schema.Copied(step=7, pause_s=0.002, group=g, host="h", mono_ns=7 * at) for g in AFTER),
        schema.Healed(step=7, bytes=1 << 20, seconds=0.25, mono_ns=7 * at, **second),
        *commits(7, {"g1": ()}, 2, start=2, live=False),
        schema.Rejoined(step=BACK_STEP, mono_ns=8 * at, **second),
        Activated(epoch=3, first_step=BACK_STEP, members=("g0", "g2", "g1"), shares=BACK),
    ]
    for step in range(BACK_STEP, STEPS):
        events += commits(step, BACK, 3, start=2)
    return events
