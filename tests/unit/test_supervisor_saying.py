"""What the supervisor says on its terminal of what it notes."""

from __future__ import annotations

from typing import Any

import pytest

from lightkeeper.events.of_supervisor import KINDS_OF_SUPERVISOR
from lightkeeper.supervisor.saying import sentence

ENDED = {
    "group": "g0", "nodes": ["n1"], "code": -9, "whose": "maybe", "failure": "killed", "step": 12,
    "reason": "killed by SIGKILL, by nobody knows whom", "after_s": 0.1,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("node_lost", {"node": "n1", "reason": "its host is gone"}, "n1 is lost: its host is gone"),
    ("node_leaving", {"node": "n1", "reason": "drained"}, "n1 is to be left: drained"),
    ("node_came", {"node": "n1"}, "n1 can be used"),
    ("node_quarantined", {"node": "n1", "reason": "Xid 79", "evidence": ""}, "n1 is in quarantine: Xid 79"),
    ("node_released", {"node": "n1"}, "n1 is released from quarantine"),
    (
        "node_checked",
        {"node": "n1", "group": "g0", "problem": "", "seconds": 0.52},
        "n1 is fit for g0 (preflight, 0.5 s)",
    ),
    (
        "node_checked",
        {"node": "n1", "group": "g0", "problem": "disk: 1 GB free", "seconds": 2.0},
        "n1 is not fit for g0: disk: 1 GB free (preflight, 2.0 s)",
    ),
    ("burned_in", {"node": "n1", "returns": True, "reason": ""}, "n1 was burned in and gets work again"),
    (
        "burned_in",
        {"node": "n1", "returns": False, "reason": "two failures in a week"},
        "n1 was burned in and stays in quarantine: two failures in a week",
    ),
    ("group_started", {"group": "g0", "nodes": ["n1", "n2"], "start": 3}, "g0 starts on n1, n2 (start 3)"),
    ("group_waits", {"group": "g0", "reason": "no node is free"}, "g0 waits: no node is free"),
    (
        "group_ended",
        ENDED,
        "g0 ended on n1 in step 12: killed by SIGKILL, by nobody knows whom (SIGKILL; perhaps the node's fault)",
    ),
    (
        "group_ended",
        ENDED | {"code": 1, "whose": "job", "step": -1, "nodes": ["n1", "n2"], "reason": "ValueError: no"},
        "g0 ended on n1, n2: ValueError: no (exit code 1; the job's own fault)",
    ),
    (
        "group_ended",
        ENDED | {"code": 0, "whose": "nobody", "failure": "finished", "reason": "finished"},
        "g0 ended on n1 in step 12: finished",
    ),
    (
        "job_restarts",
        {"number": 1, "step": 40, "reason": "quorum lost"},
        "all groups start again (restart 1) from the newest checkpoint, after step 40: quorum lost",
    ),
    (
        "job_restarts",
        {"number": 2, "step": -1, "reason": "quorum lost"},
        "all groups start again (restart 2) from the start: no step was committed: quorum lost",
    ),
    ("run_stopping", {"reason": "SIGTERM"}, "the run ends in good order: SIGTERM"),
    ("run_failed", {"failure": "crash_loop", "reason": "three times"}, "gives up (crash loop): three times"),
    ("run_ended", {"code": 0, "reason": "finished"}, ""),
]


@pytest.mark.parametrize(("kind", "fields", "said"), CASES)
def test_a_note_is_said_in_a_sentence(kind: str, fields: dict[str, Any], said: str) -> None:
    KINDS_OF_SUPERVISOR[kind](**fields)  # or the event could not be written
    assert sentence(kind, fields) == said


def test_every_kind_that_the_machine_notes_has_words() -> None:
    assert {kind for kind, _, _ in CASES} == KINDS_OF_SUPERVISOR.keys() - {"notified", "not_notified"}


def test_a_kind_without_words_is_a_bug() -> None:
    with pytest.raises(ValueError, match="no words for notified"):
        sentence("notified", {})
