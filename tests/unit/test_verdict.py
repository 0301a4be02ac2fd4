"""One verdict for each incident, out of tables of events; whoever only noticed is no culprit."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helpers beside it are found
from incident_events import ALL, EXITED, KILLED, STUCK, begins, failed, kept, lost, of, one, over, phases, raised, start

from lightkeeper.events import why
from lightkeeper.events.of_progress import Stuck
from lightkeeper.events.schema import Committed, Event, Evidence, Fenced, JobStopped
from lightkeeper.events.verdict import combined, incidents

REDUCES = "rank 0 reduce of step 12 for 0.4 s"
COMPUTES = "rank 0 compute of step 12 for 3.1 s"
OVERDUE = "rank 1 lives and has made no progress in compute of step 12 for 20.0 s (15.0 s are borne)"

CASES: dict[str, tuple[list[Event], tuple[str, int, str, set[str], set[str]]]] = {
    "killed": (
        [failed(1.0, "g0", "g1"), failed(1.0, "g2", "g1"), lost(1.1, "g1", KILLED, "manager"), *over(2, ("g0", "g2"))],
        ("g1", 0, "killed", set(), {"g0", "g2"}),
    ),
    "a reduce fails before the death is told, and a third is named too": (
        [failed(1.0, "g0", "g1", "g2"), lost(1.2, "g1", KILLED, "stream"), *over(2, ("g0", "g2"))],
        ("g1", 0, "silent", set(), {"g0", "g2"}),
    ),
    "frozen": (
        [
            phases(3.0, g0=REDUCES, g1=COMPUTES + " (stopped by a signal)", g2=REDUCES),
            lost(3.0, "g1", "rank 0 has been stopped for 2.0 s", "frozen", since_s=2.0),
            of(Fenced, 3.1, "g1", reason="left out"),
            *over(3.2, ("g0", "g2")),
        ],
        ("g1", 0, "frozen", set(), {"g0", "g2"}),
    ),
    "silent": (
        [lost(3.0, "g1", "its manager has been silent for 2.1 s", "lease"), *over(3.2, ("g0", "g2"))],
        ("g1", -1, "silent", set(), {"g0", "g2"}),
    ),
    "stuck": (
        [of(Stuck, 20, "g1", **STUCK), lost(20.1, "g1", OVERDUE, "progress", rank=1), *over(20.2, ("g0", "g2"))],
        ("g1", 1, "stuck", set(), {"g0", "g2"}),
    ),
    "73: one raises, one is stopped, two wait": (
        [
            raised(5.0, "g2"),
            lost(5.1, "g2", "rank 0 raised ValueError: bad batch", "manager"),
            lost(7.2, "g1", "rank 0 has been stopped for 2.0 s", "frozen", since_s=2.0),
            *over(7.4, ("g0",)),
        ],
        ("g2", 0, "exception", {"g1"}, {"g0"}),
    ),
    "73, but it was stopped before the other raised": (
        [
            raised(5.0, "g2"),
            lost(5.1, "g2", "rank 0 raised ValueError: bad batch", "manager"),
            lost(5.4, "g1", "rank 0 has been stopped for 2.0 s", "frozen", since_s=2.0),
            *over(7.4, ("g0",)),
        ],
        ("g1", 0, "frozen", {"g2"}, {"g0"}),
    ),
    "a rank died, and the other ranks of its group failed for it": (
        [
            failed(1.0, "g1", rank=1),
            failed(1.0, "g0", "g1"),
            lost(1.2, "g1", KILLED, "manager"),
            *over(2, ("g0", "g2")),
        ],
        ("g1", 0, "killed", set(), {"g0", "g2", "g1 rank 1"}),
    ),
    "a connection was cut": (
        [failed(1.0, "g0", "g1"), failed(1.0, "g1", "g0"), *over(2, ALL)],
        ("", -1, "network", set(), {"g0", "g1", "g2"}),
    ),
    "the ranks of a group lost each other": (
        [
            lost(1.0, "g1", "rank 0 lost its connection to the other ranks of the group: reset", "manager"),
            *over(2, ("g0", "g2")),
        ],
        ("g1", 0, "inside", set(), {"g0", "g2"}),
    ),
    "a joiner lost what led to the entry that took it in": (
        [
            lost(1.0, "g1", "it lost the entries before the one that made it a member", "manager"),
            *over(2, ("g0", "g2")),
        ],
        ("g1", -1, "behind", set(), {"g0", "g2"}),
    ),
    "all stand still": (
        [of(Stuck, 20 + i, g, **{**STUCK, "phase": "checkpoint"}) for i, g in enumerate(ALL)],
        ("", -1, "storage", set(), set()),
    ),
    "the job's bug": (
        [*(raised(5.0 + i / 10, g) for i, g in enumerate(ALL)), of(JobStopped, 6, reason="the same", ok=False)],
        ("", -1, "job", set(), set()),
    ),
    "two of three have the same bug": (
        [raised(5.0, "g0"), raised(5.1, "g1"), *over(6, ("g2",))],
        ("g0", 0, "exception", {"g1"}, {"g2"}),
    ),
    "the operator": (
        [lost(1.0, "g1", "fenced by ann", "operator"), *over(2, ("g0", "g2"))],
        ("g1", -1, "operator", set(), {"g0", "g2"}),
    ),
    "only who had not arrived is known": (
        [begins(2.9), phases(3.0, g0=REDUCES, g1=COMPUTES, g2=REDUCES), *over(4, ("g0", "g2"))],
        ("g1", 0, "unknown", set(), {"g0", "g2"}),
    ),
    "nobody says anything": (
        [begins(1.0), *over(2, ALL)],
        ("", -1, "unknown", set(), {"g0", "g1", "g2"}),
    ),
    "the flight recorder names one inside": (
        [
            of(Evidence, 1.0, "g1", folder="incidents/a", recorder="all_reduce #12: rank 3 of g1 never arrived"),
            lost(1.1, "g1", "its manager has been silent for 2.1 s", "lease"),
            *over(2, ("g0", "g2")),
        ],
        ("g1", 3, "silent", set(), {"g0", "g2"}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_did_it(name: str) -> None:
    events, (group, rank, kind, others, victims) = CASES[name]
    (incident,) = incidents([*start(), *events])
    who = incident.culprit
    assert (who.group, who.rank, who.kind) == (group, rank, kind), incident
    assert {other.group for other in incident.others} == others
    assert set(incident.victims) == victims
    assert incident.step == 12 or not victims
    lines = why.lines(incident)
    assert len(lines) == 6
    assert all(lines), lines
    assert incident.advice and (incident.done or not victims)


def test_a_single_weak_signal_is_little_and_is_said_to_be() -> None:
    weak = one(begins(2.9), phases(3.0, g0=REDUCES, g1=COMPUTES, g2=REDUCES), *over(4, ("g0", "g2")))
    assert weak.low and weak.culprit.confidence == 0.5
    assert "do not act on it alone" in why.lines(weak)[0]
    strong = one(lost(1.1, "g1", KILLED, "manager"), *over(2, ("g0", "g2")))
    assert not strong.low and "do not act" not in why.lines(strong)[0]


def test_signals_add_up_and_each_is_shown_with_its_weight() -> None:
    alone = one(lost(3.0, "g1", "its manager has been silent for 2.1 s", "lease"), *over(4, ("g0", "g2")))
    more = one(
        failed(1.0, "g0", "g1"),
        failed(1.0, "g2", "g1"),
        phases(3.0, g0=REDUCES, g1=COMPUTES, g2=REDUCES),
        lost(3.0, "g1", "its manager has been silent for 2.1 s", "lease"),
        *over(4, ("g0", "g2")),
    )
    assert alone.culprit.confidence == 0.65 < more.culprit.confidence == combined([0.65, 0.5, 0.5])
    assert {signal.name for signal in more.signals} == {"silence", "not arrived", "named by others"}
    shown = why.lines(more)[2]
    assert "silence 0.65" in shown and "not arrived 0.50" in shown and "named by others 0.50" in shown


def test_one_signal_of_each_kind_is_shown_and_whose_it_is_if_it_is_nobodys_fault() -> None:
    stuck = [of(Stuck, 20, "g1", **STUCK), lost(20.1, "g1", OVERDUE, "progress", rank=1), *over(20.2, ("g0", "g2"))]
    assert why.lines(one(*stuck))[2].count("deadline 0.85") == 1
    shown = why.lines(one(*(raised(5.0 + i / 10, g) for i, g in enumerate(ALL))))[2]
    assert all(f"exception 0.95 ({group}: rank 0 raised" in shown for group in ALL)


def test_a_signal_said_twice_counts_once() -> None:
    twice = [lost(3.0 + i, "g1", "its manager has been silent for 2.1 s", "lease") for i in range(2)]
    assert one(*twice, *over(5, ("g0", "g2"))).culprit.confidence == 0.65


def test_who_names_nobody_but_itself_is_suspected_a_little() -> None:
    broken = one(failed(1.0, "g1", "g1"), lost(1.1, "g1", "named by most failed reduces", "failures"))
    assert (broken.culprit.group, broken.culprit.confidence) == ("g1", combined([0.65, 0.1]))
    alone = one(failed(1.0, "g1", "g1"), lost(1.1, "g0", KILLED, "manager"))
    assert alone.culprit.group == "g0" and not alone.others
    assert "complains of itself 0.10" in why.lines(broken)[2]


@pytest.mark.parametrize(
    ("words", "group", "rank", "weight"),
    [
        ("all_reduce #12 of e1r0: rank 0 of g2 never arrived; rank 0 of g0, rank 0 of g1 waits", "g2", 0, 0.8),
        ("all_reduce #12 of tp: rank 3 never arrived; rank 0, rank 1 waits", "g1", 3, 0.8),
        ("all_reduce #3 of e1r0 [[5]]: rank 1 of g0 called broadcast [[5]] instead (COLLECTIVE_TYPE)", "g0", 1, 0.8),
        ("all_reduce #3 of e1r0: rank 0 of g0 waits, and there is no dump of rank 0 of g2", "g2", 0, 0.5),
        ("all_reduce #246 of e1r0: no dump of rank 0 of g2; rank 0 of g0 waits", "g2", 0, 0.5),
        ("", "", -1, 0.0),
    ],
)
def test_who_is_missing_by_the_flight_recorders(words: str, group: str, rank: int, weight: float) -> None:
    incident = one(
        of(Evidence, 1.0, "g1", folder="incidents/a", recorder=words), failed(1.1, "g0", "g7"), *over(2, ("g0",))
    )
    told = [(s.group, s.rank, s.weight) for s in incident.signals if s.name == "recorder"]
    assert told == ([(group, rank, weight)] if group else [])


def test_combined_is_never_certain() -> None:
    assert combined([]) == 0.0
    assert combined([0.5, 0.5]) == 0.75
    assert combined([0.95] * 9) == 0.99


def test_the_class_of_its_log_gives_the_advice() -> None:
    told = of(
        Evidence, 1.0, "g1", folder="incidents/a", log_class="host_oom (rank 2): Out of memory: Killed process 7 (x)"
    )
    incident = one(told, lost(1.1, "g1", KILLED, "manager"), *over(2, ("g0", "g2")))
    assert incident.evidence == ("incidents/a",) and "kept in incidents/a" in why.lines(incident)[2]
    assert "log" in {signal.name for signal in incident.signals}
    assert "more memory" in incident.advice
    victim = msgspec.structs.replace(told, log_class="gloo: Connection closed by peer")
    assert {signal.name for signal in one(victim, lost(1.1, "g1", KILLED, "manager")).signals} == {"exit"}


@pytest.mark.parametrize(("folders", "told"), [(["", "incidents/a"], "kept in incidents/a"), ([""], "")])
def test_evidence_that_has_no_folder_is_not_named(folders: list[str], told: str) -> None:
    kept = [of(Evidence, 0.5, "g1", folder=folder, missing={"folder": "No space left"}) for folder in folders]
    incident = one(lost(1.0, "g1", KILLED, "manager"), *kept, *over(2, ("g0", "g2")))
    assert incident.evidence == tuple(folder for folder in folders if folder)
    line = why.lines(incident)[2]
    assert line.endswith(told) and ("kept in" in line) is bool(told)


def advised(cause: str, log_class: str, *more: Event, by: str = "manager", **fields: object) -> str:
    told = kept(1.0, "g1", cause, log_class=log_class, **fields)
    return one(told, lost(1.1, "g1", cause, by), *more, *over(2, ("g0", "g2"))).advice


def test_advice_follows_what_weighs_most_not_a_log_that_says_something_else() -> None:
    oom = "cuda_oom (rank 0): torch.OutOfMemoryError: CUDA out of memory."
    assert "OOM killer" in advised(KILLED, oom)
    assert "smaller microbatches" in advised("rank 0 exited 1", oom)
    assert "before g1 is started again" in one(raised(0.5, "g1"), kept(1.0, "g1", EXITED, log_class=oom)).advice
    own = raised(0.5, "g1", type="OutOfMemoryError", message="CUDA out of memory.")
    assert "smaller microbatches" in one(own, kept(1.0, "g1", EXITED, log_class=oom)).advice


def test_a_log_weighs_by_its_own_confidence_and_a_warning_or_a_peers_line_nothing() -> None:
    def weight(log_class: str) -> list[float]:
        incident = one(kept(1.0, "g1", KILLED, log_class=log_class), lost(1.1, "g1", KILLED, "manager"))
        return [signal.weight for signal in incident.signals if signal.name == "log"]

    assert weight("cuda_oom (rank 0): torch.OutOfMemoryError: CUDA out of memory.") == [0.58]
    assert weight("user_error (rank 0): mine.Broken: told at the end of a traceback") == [0.36]
    assert weight("missing_file (rank 0): bash: torchrun: command not found") == [0.42]
    lspci = (
        "2026-11-30 11:33:01,890 - root - WARNING - Error running lspci: [Errno 2] No such file or directory: 'lspci'"
    )
    assert weight(f"missing_file (rank 0): [titan] {lspci}") == []
    assert weight("cuda_oom (rank 0): lightkeeper: g2 lost: rank 0 raised OutOfMemoryError: CUDA out of memory.") == []
    assert weight("stuck (rank 0): lightkeeper: rank 0 has made no progress in compute of step 12 for 9 s") == []


def test_stacks_are_advised_only_if_there_are_any() -> None:
    crash = "rank 0 was killed by SIGSEGV"
    assert "look at its stacks" in advised(crash, "", taken={"stacks-rank0": 100})
    assert "look at its stacks" not in advised(crash, "", taken={"log-rank0": 100}) and "crashed" in advised(crash, "")
    assert "look at its stacks" in advised(OVERDUE, "", by="progress", taken={"stacks-rank1": 9})
    assert advised(OVERDUE, "", by="progress").startswith("if the work may take that long")


def test_who_lost_only_a_manager_is_told_to_start_it_again() -> None:
    gone = [
        of(Committed, 0.5, "g1", process="manager g1", step=11, epoch=1),
        lost(1.0, "g1", "its manager's stream broke", "stream"),
    ]
    went_on = of(Committed, 5, "g0", process="rank g0/0", step=12, epoch=2)
    assert one(*gone, *over(2, ("g0", "g2")), went_on).advice.startswith("start the same launch line again: h is up")
    elsewhere = msgspec.structs.replace(went_on, host="other")
    assert one(*gone, *over(2, ("g0", "g2")), elsewhere).advice.startswith("look whether h is up")


def test_since_is_when_it_began_not_when_it_was_noticed() -> None:
    frozen = one(lost(3.0, "g1", "rank 0 has been stopped for 2.0 s", "frozen"), *over(4, ("g0", "g2")))
    assert frozen.culprit.since == 1001.0
    stuck = one(of(Stuck, 20, "g1", **STUCK), lost(20.1, "g1", OVERDUE, "progress"), *over(21, ("g0", "g2")))
    assert stuck.culprit.since == 1000.0
