"""Who may speak for a group: a verdict on a `Hello`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightkeeper.lighthouse.group import Group
from lightkeeper.lighthouse.messages import Hello, Refused, Stop
from lightkeeper.lighthouse.names import Membership
from lightkeeper.lighthouse.silence import Patience, silent

PARKED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class View:
    """What the verdict looks at: the job's configuration, its groups, its newest membership and its end.

    Attributes:
        patience: how long whose silence is borne.
        lease_s: how long a group whose stream has just broken may take to come back, in seconds.
    """

    config: Hello | None
    groups: Mapping[str, Group]
    newest: Membership | None
    stopped: Stop | None
    patience: Patience
    lease_s: float


def refusal(hello: Hello, view: View, now: float) -> Refused | None:
    """Why this manager is not let in, or None if it is.

    Args:
        hello: its first message.
        view: the job as it stands.
        now: monotonic seconds.
    """
    if hello.groups < 1 or not 1 <= hello.minimum <= hello.groups or not 0 <= hello.spares < hello.groups:
        must = "1 <= minimum <= groups and 0 <= spares < groups must hold"
        return Refused(f"{hello.group} asks for {_asked(hello)}; {must}")
    current = view.groups.get(hello.group)
    if current is not None and current.incarnation == hello.incarnation:
        return None
    if view.stopped is not None:
        return Refused(f"the job has just ended ({view.stopped.reason}) and its groups are leaving", retry=True)
    if current is not None and current.gone is None:
        if current.connection is not None and now - current.heard <= view.lease_s:
            return Refused(
                f"{hello.group} is already run by incarnation {current.incarnation}, which still beats; end it first "
                "or choose another --group"
            )
        if current.connection is not None and not silent(current, view.patience, now):
            asked = f"{hello.group} is run by incarnation {current.incarnation}, which is asked for a sign of life"
            return Refused(asked, retry=True)
        if now - current.heard <= view.lease_s:
            return Refused(
                f"{hello.group} was run by incarnation {current.incarnation} until just now; its lease must pass first",
                retry=True,
            )
    config = view.config
    others = [g for g in view.groups.values() if g.name != hello.group and g.gone is None and g.hello is not None]
    unlike = [g for g in others if g.hello is not None and not alike(g.hello, hello) and _heard(g, view, now)]
    if unlike and unlike[0].hello is not None:
        there = f"{unlike[0].name} for {_asked(unlike[0].hello)}"
        return Refused(
            f"{hello.group} asks for {_asked(hello)}, but {there}; give all groups the same",
            retry=all(g.connection is None for g in unlike),  # they went away just now: perhaps all are started anew
        )
    if config is not None and len(others) >= config.groups + PARKED_MAX:
        return Refused(f"the job has its {config.groups} groups, and {PARKED_MAX} are parked", retry=True)
    return _running(hello, view, now)


def alike(one: Hello, other: Hello) -> bool:
    """Whether two groups were started with the same numbers."""
    return (one.groups, one.minimum, one.spares) == (other.groups, other.minimum, other.spares)


def _heard(group: Group, view: View, now: float) -> bool:
    """Whether its numbers count; one that is silent for longer may have been killed with a job that had others."""
    if group.connection is not None:
        return not silent(group, view.patience, now)
    return now - group.heard <= view.lease_s


def _asked(hello: Hello) -> str:
    spares = f", {hello.spares} of them spares," if hello.spares else ""
    return f"{hello.groups} groups{spares} with a minimum of {hello.minimum}"


def _running(hello: Hello, view: View, now: float) -> Refused | None:
    """A group that is not a member of the epoch in force."""
    if view.newest is None or view.newest.slot_of(hello.group, hello.incarnation) is not None:
        return None
    members = [view.groups[name] for name in view.newest.groups if name in view.groups]
    alive = [g for g in members if g.gone is None and view.newest.slot_of(g.name, g.incarnation) is not None]
    if any(g.connection is not None for g in alive):
        return None  # it joins: heals from them
    if any(now - g.heard <= view.patience.away_s for g in alive):
        return Refused(
            "the members of the running job have not been heard yet; their lease must pass first", retry=True
        )
    return None
