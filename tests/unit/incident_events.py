"""The events of an incident, a line each: three groups in epoch 1, of which g1 is lost in step 12 as a rule."""

from __future__ import annotations

from lightkeeper.events.schema import (
    Activated,
    Event,
    Evidence,
    GroupLost,
    LastPhases,
    Prepared,
    Recovered,
    ReduceFailed,
    UserError,
)
from lightkeeper.events.verdict import Incident, incidents

ALL = ("g0", "g1", "g2")
KILLED = "rank 0 was killed by SIGKILL"
EXITED = "rank 0 exited 1 after ValueError at step 12, which it has printed"
STUCK = {"rank": 1, "phase": "compute", "step": 12, "since_s": 20.0, "deadline_s": 15.0, "state": "sleeping"}


def of(kind: type[Event], at: float, group: str = "", **fields: object) -> Event:
    about = {"group": group, "incarnation": f"{group}-1" if group else "", "host": "h"}
    return kind(**{**about, "wall": 1000.0 + at, "mono_ns": int(at * 1e9), **fields})  # type: ignore[arg-type]


def start() -> list[Event]:
    return [of(Activated, 0, epoch=1, first_step=0, members=ALL, cause="first epoch of the job")]


def over(at: float, members: tuple[str, ...], step: int = 12, epoch: int = 2) -> list[Event]:
    """The others go on."""
    went_on = [of(Activated, at, epoch=epoch, first_step=step, members=members, cause="g1 was lost")]
    went_on += [
        of(Recovered, at + 0.1, g, step=step, epoch=epoch, stall_s=0.3, further=(i,)) for i, g in enumerate(members)
    ]
    return went_on


def failed(at: float, group: str, *suspects: str, rank: int = 0, epoch: int = 1) -> Event:
    return of(ReduceFailed, at, group, step=12, epoch=epoch, rank=rank, suspects=suspects, error="reset by peer")


def lost(at: float, group: str, cause: str, by: str, **fields: object) -> Event:
    return of(GroupLost, at, group, cause=cause, detected_by=by, step=12, **fields)


def raised(at: float, group: str, rank: int = 0, **fields: object) -> Event:
    given = {"step": 12, "type": "ValueError", "message": "bad batch", **fields}
    return of(UserError, at, group, rank=rank, **given)


def phases(at: float, **words: str) -> Event:
    return of(LastPhases, at, epoch=2, phases=words, silent_s=dict.fromkeys(words, 0.1))


def begins(at: float, why: str = "a member asked for it") -> Event:
    return of(Prepared, at, epoch=2, change="recovery", why=why)


def one(*events: Event) -> Incident:
    (incident,) = incidents([*start(), *events])
    return incident


def kept(at: float, group: str, reason: str, **fields: object) -> Event:
    return of(
        Evidence, at, group, process=f"manager {group}", folder=f"incidents/{group}-{at}", reason=reason, **fields
    )
