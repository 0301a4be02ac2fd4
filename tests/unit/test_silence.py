"""The verdict on silence as a table: nobody is gone for being silent unless somebody waits for them."""

from __future__ import annotations

import pytest

from lightkeeper.lighthouse.group import Gone, Group
from lightkeeper.lighthouse.messages import Beat, Failed, Hello
from lightkeeper.lighthouse.names import Epoch, Term
from lightkeeper.lighthouse.silence import Look, Patience

LEASE_S = 2.0
NOW = 100.0
FAILED = Failed(Epoch(1, Term(1, "lh")), 3, "broken")


def verdict(members: list[Group], it: Group, recovering: bool = False) -> Gone | None:
    return Look(members, () if recovering else None, Patience.of(3, LEASE_S, 0.2), NOW).verdict(it)


def member(
    name: str,
    connected: bool = True,
    silent_s: float = 0.1,
    waits_s: float = 0.0,
    stopped_s: float = 0.0,
    failed: bool = False,
) -> Group:
    """A member as the lighthouse sees it; its stream stood once, and broke `silent_s` ago if it is not connected."""
    group = Group(name, f"{name}-i1", heard=NOW - silent_s, connection=1 if connected else None)
    group.beat = Beat(1, 3, "reduce" if waits_s else "compute", round(waits_s * 1000), round(stopped_s * 1000))
    group.failed = FAILED if failed else None
    group.hello = Hello("job", name, group.incarnation, "a:1", 3, 1)
    return group


CASES = [
    # other, the member itself, recovering -> detected_by
    ("a member that beats", {"waits_s": 60.0}, {}, False, None),
    ("silent, nobody waits", {}, {"silent_s": 60.0}, False, None),
    ("silent within the lease, others stand", {"waits_s": 60.0}, {"silent_s": 2.0}, False, None),
    ("silent beyond the lease, others stand", {"waits_s": 60.0}, {"silent_s": 2.1}, False, "lease"),
    ("silent beyond the lease, others in a normal reduce", {"waits_s": 0.05}, {"silent_s": 60.0}, False, None),
    ("silent beyond the lease in a recovery", {}, {"silent_s": 2.1}, True, "lease"),
    ("silent within the lease in a recovery", {}, {"silent_s": 1.9}, True, None),
    ("stream broken, nobody waits", {}, {"connected": False, "silent_s": 60.0}, False, None),
    ("stream broken, others stand, in the lease", {"waits_s": 1.0}, {"connected": False, "silent_s": 1.0}, False, None),
    ("stream broken, others stand for long", {"waits_s": 60.0}, {"connected": False, "silent_s": 2.1}, False, "lease"),
    ("stream broken, another reports", {"failed": True}, {"connected": False, "silent_s": 0.0}, False, "stream"),
    ("stream broken in a recovery", {}, {"connected": False, "silent_s": 0.0}, True, "stream"),
    ("a stopped rank, others stand", {"waits_s": 60.0}, {"stopped_s": 2.1}, False, "frozen"),
    ("a rank stopped within the lease", {"waits_s": 60.0}, {"stopped_s": 2.0}, False, None),
    ("a stopped rank, nobody waits", {}, {"stopped_s": 60.0}, False, None),
    ("its own report does not count", {}, {"connected": False, "silent_s": 60.0, "failed": True}, False, None),
    ("it waits for others itself", {}, {"silent_s": 60.0, "waits_s": 60.0}, False, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "other", "itself", "recovering", "detected_by"), CASES, ids=[case[0] for case in CASES]
)
def test_verdict(what: str, other: dict, itself: dict, recovering: bool, detected_by: str | None) -> None:
    it = member("it", **itself)
    gone = verdict([member("a", **other), it, member("b")], it, recovering)
    assert (gone.detected_by if gone else None) == detected_by
    if gone:
        assert gone.cause and gone.step == 3


def test_with_fewer_than_half_in_touch_a_broken_stream_waits_two_leases() -> None:
    it = member("it", connected=False, silent_s=3.9)
    members = [member("a", failed=True), it, member("b", connected=False)]
    assert verdict(members, it, True) is None
    it.heard = NOW - 4.1
    gone = verdict(members, it, True)
    assert gone is not None and gone.detected_by == "lease"


def test_who_is_gone_stays_gone_with_the_first_cause() -> None:
    it = member("it")
    it.gone = Gone("killed", "manager")
    assert verdict([it, member("a")], it) is it.gone


def test_a_stream_that_never_stood_is_not_a_broken_one() -> None:
    """After a lighthouse's restart, before this member has connected."""
    it = member("it", connected=False, silent_s=1.0)
    it.hello = None
    members = [member("a", failed=True), it, member("b")]
    assert verdict(members, it, True) is None
    it.heard = NOW - 2.1
    gone = verdict(members, it, True)
    assert gone is not None and gone.detected_by == "lease"


def test_the_dead_wait_for_nobody() -> None:
    it, dead = member("it", silent_s=60.0), member("a", waits_s=60.0, failed=True)
    dead.gone = Gone("killed", "manager")
    assert verdict([it, dead], it) is None
