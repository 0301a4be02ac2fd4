"""Who may speak for a group: the table of verdicts on a `Hello`."""

from __future__ import annotations

import re

import pytest

from lightkeeper.lighthouse.admission import PARKED_MAX, View, refusal
from lightkeeper.lighthouse.group import Gone, Group
from lightkeeper.lighthouse.messages import Beat, Hello, Join, Stop
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term
from lightkeeper.lighthouse.silence import Patience

NOW, LEASE_S = 100.0, 2.0


def hello(group: str = "g0", incarnation: str = "new", groups: int = 2, minimum: int = 1) -> Hello:
    return Hello("job", group, incarnation, "a:1", groups, minimum)


def known(
    group: str, incarnation: str = "old", connected: bool = True, silent_s: float = 0.1, gone: bool = False
) -> Group:
    it = Group(
        group, incarnation, heard=NOW - silent_s, connection=1 if connected else None, hello=hello(group, incarnation)
    )
    it.join, it.beat = Join(("a:2",)), Beat(1, 7, "compute")
    it.gone = Gone("killed", "manager") if gone else None
    return it


def epoch_of(*groups: str) -> Membership:
    return Membership(Epoch(3, Term(1, "lh")), tuple(Member(g, "old", "a:1") for g in groups))


def verdict(
    speaker: Hello, *groups: Group, newest: Membership | None = None, stopped: Stop | None = None
) -> tuple[str, bool] | None:
    config = groups[0].hello if groups else None
    refused = refusal(
        speaker, View(config, {g.name: g for g in groups}, newest, stopped, Patience.of(2, LEASE_S, 0.2), LEASE_S), NOW
    )
    return None if refused is None else (refused.reason, refused.retry)


def test_the_first_is_let_in() -> None:
    assert verdict(hello()) is None


CASES = [
    ("another run of it beats", [known("g0")], None, "which still beats", False),
    ("another run of it went away just now", [known("g0", connected=False)], None, "its lease must pass first", True),
    ("another run of it went away long ago", [known("g0", connected=False, silent_s=3)], None, None, None),
    ("another run of it is silent on its stream", [known("g0", silent_s=3)], None, None, None),
    ("another run of it is gone", [known("g0", gone=True)], None, None, None),
    ("the same run returns", [known("g0", "new", connected=False)], None, None, None),
    ("the job is full: it is parked", [known("g1"), known("g2")], None, None, None),
    ("too many are parked", [known(f"p{i}") for i in range(2 + PARKED_MAX)], None, "2 groups, and 1000 are park", True),
    ("the job was full", [known("g1"), known("g2", gone=True)], None, None, None),
    ("the job runs without it: it joins", [known("g1")], epoch_of("g1"), None, None),
    ("the members are not back yet", [known("g1", connected=False)], epoch_of("g1"), "have not been heard yet", True),
    ("the members are all dead", [known("g1", gone=True)], epoch_of("g1"), None, None),
]  # fmt: skip


@pytest.mark.parametrize(("what", "groups", "newest", "line", "retry"), CASES, ids=[case[0] for case in CASES])
def test_verdicts(
    what: str, groups: list[Group], newest: Membership | None, line: str | None, retry: bool | None
) -> None:
    refused = verdict(hello(), *groups, newest=newest)
    if line is None:
        assert refused is None
    else:
        assert refused is not None and refused[1] == retry
        assert re.search(line, refused[0]), refused[0]


def test_while_a_job_ends_the_next_run_waits() -> None:
    refused = verdict(hello(), known("g1"), stopped=Stop("finished: step 9 is final", True))
    assert refused == ("the job has just ended (finished: step 9 is final) and its groups are leaving", True)


def test_numbers_are_compared_only_with_those_who_are_there() -> None:
    assert verdict(hello(groups=5), known("g1", gone=True)) is None
    refused = verdict(hello(groups=5), known("g1"))
    assert refused is not None and "g0 asks for 5 groups with a minimum of 1, but g1 for 2" in refused[0]
    assert not refused[1]


def test_a_job_that_is_started_again_with_other_numbers_waits_for_those_that_were_killed_with_the_old_ones() -> None:
    """Their leases have not passed; that g1 comes before g0 must make no difference."""
    refused = verdict(hello("g1", groups=3), known("g0", connected=False))
    assert refused is not None and "g1 asks for 3 groups" in refused[0] and refused[1]
    for silent in (known("g0", connected=False, silent_s=3), known("g0", silent_s=3)):
        assert verdict(hello("g1", groups=3), silent) is None
    assert verdict(hello("g1", groups=3), known("g0", connected=False), known("g2"))[1] is False  # type: ignore[index]
