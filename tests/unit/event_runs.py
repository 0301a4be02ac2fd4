"""Small runs as lists of events: three groups, six microbatches a step; g1 is killed, and may come back."""

from __future__ import annotations

import msgspec

from lightkeeper.events import schema
from lightkeeper.events.schema import Activated, Committed, Event, FaultInjected, GroupLost

DEAL = {"g0": (0, 3), "g1": (1, 4), "g2": (2, 5)}
HEIRS = {"g0": (0, 3, 1), "g2": (2, 5, 4)}
FAULT_STEP, STEPS = 12, 15
Shares = dict[str, tuple[int, ...]]


def commit(group: str, step: int, shares: Shares, epoch: int, **over: object) -> Committed:
    values: dict[str, object] = {
        "step": step,
        "epoch": epoch,
        "group": group,
        "incarnation": group + "-1",
        "process": f"rank {group}/0",
        "total": 6,
        "microbatches": shares[group],
        "computed": len(shares[group]),
        "counted": 6,
        "seconds": 1.0,
        "wait_s": 0.2,
        "fingerprint": f"f{step}",
        "loss": 5.0 - step / 10,
        "host": "h",
        "mono_ns": (step + 1) * 10**9,
    }
    return Committed(**{**values, **over})  # type: ignore[arg-type]


def good_run() -> list[Event]:
    """g1 is killed in the reduce of step 12."""
    events: list[Event] = [Activated(epoch=1, first_step=0, members=("g0", "g1", "g2"), shares=DEAL)]
    for step in range(FAULT_STEP):
        events += [commit(group, step, DEAL, 1) for group in DEAL]
    at = FAULT_STEP * 10**9
    events.append(
        FaultInjected(
            fault="kill",
            phase="reduce",
            step=FAULT_STEP,
            group="g1",
            incarnation="g1-1",
            host="h",
            mono_ns=at + 500_000_000,
        )
    )
    events.append(
        GroupLost(
            group="g1",
            incarnation="g1-1",
            cause="signal 9",
            detected_by="manager",
            host="h",
            mono_ns=at + 510_000_000,
        )
    )
    events.append(Activated(epoch=2, first_step=FAULT_STEP, members=("g0", "g2"), shares=HEIRS))
    for group in HEIRS:
        events.append(commit(group, FAULT_STEP, HEIRS, 2, seconds=1.5, attempts=2))
        events.append(schema.Recovered(step=FAULT_STEP, epoch=2, group=group, further=HEIRS[group][2:]))
    for step in range(FAULT_STEP + 1, STEPS):
        events += [commit(group, step, HEIRS, 2, seconds=1.4) for group in HEIRS]
    return events


def swap(events: list[Event], group: str, step: int, **over: object) -> list[Event]:
    return [
        msgspec.structs.replace(event, **over)
        if isinstance(event, Committed) and (event.group, event.step) == (group, step)
        else event
        for event in events
    ]


def without(events: list[Event], group: str, step: int) -> list[Event]:
    return [e for e in events if not (isinstance(e, Committed) and (e.group, e.step) == (group, step))]


def event_of_g1(kind: type[Event], at_s: float, incarnation: str = "g1-2", **fields: object) -> Event:
    where: dict[str, object] = {"group": "g1", "incarnation": incarnation, "host": "h", "mono_ns": int(at_s * 1e9)}
    return kind(**{**where, **fields})  # type: ignore[arg-type]


BACK = {"g0": (0, 3), "g1": (), "g2": (1, 2, 4, 5)}
BACK_STEP, END = 18, 21


def returning_run() -> list[Event]:
    """The same run, and g1 comes back: started at 15.2 s, a member from step 18 on."""
    events = [
        *good_run(),
        event_of_g1(schema.ProcessStarted, 15.2, incarnation="", command="launch --group g1", child=7),
        event_of_g1(schema.Joined, 16.0),
        event_of_g1(schema.Healing, 16.1, step=17),
    ]
    for step in range(STEPS, BACK_STEP):
        events += [commit(group, step, HEIRS, 2, seconds=1.4) for group in HEIRS]
    for group in HEIRS:
        events.append(schema.Copied(step=17, pause_s=0.002, group=group, host="h", mono_ns=17 * 10**9))
    events.append(event_of_g1(schema.Healed, 17.5, step=17, bytes=2 << 20, seconds=0.5, donors=2))
    events.append(commit("g1", 17, {"g1": ()}, 2, incarnation="g1-2", live=False, computed=0))
    events.append(event_of_g1(schema.Rejoined, 18.2, step=BACK_STEP))
    events.append(Activated(epoch=3, first_step=BACK_STEP, members=("g0", "g1", "g2"), shares=BACK))
    for step in range(BACK_STEP, END):
        late = {"seconds": 1.7 if step == BACK_STEP else 1.0}
        events += [commit(group, step, BACK, 3, **late) for group in HEIRS]
        events.append(commit("g1", step, BACK, 3, incarnation="g1-2", **late))
    return events
