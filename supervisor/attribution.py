"""What the end of a group says: of its node, of the job, of nobody. A pure function of exit code and verdict.

The member that ends is often a victim, so its exit code alone blames nobody: the verdict over the run's events does
(`events/verdict.py`), and what is known of the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Whose: TypeAlias = Literal["node", "maybe", "job", "nobody"]

USAGE, REFUSED, FENCED, GAVE_UP, STOPPED, ORPHANED = 2, 103, 104, 105, 106, 107  # as in `manager.exits`
INTERRUPTED, TERMINATED = 130, 143
KILLED = (-9, 137)
SURE = 0.6  # as in `events.verdict`

HARDWARE = frozenset(
    ["hardware", "xid", "ecc", "nvlink", "cuda_error", "gpu_lost"]
)  # classes of `lightkeeper diagnose`
NODES = frozenset(["silent"])  # kinds of a verdict by which the node itself is gone, if it says nothing
SUSPECT = frozenset(["killed", "frozen", "silent", "stuck", "inside", "gone", "slow"])


@dataclass(frozen=True)
class End:
    """How one start of a group ended.

    Attributes:
        code: exit code of its launcher; negative for a signal.
        seen: whether its node has told that code; else nobody knows what became of it.
        finished: whether the run was finished with it.
        quorum: whether the job ended because too few groups were left.
        asked: whether somebody asked it to leave: an operator, a scheduler, a time limit.
        node_lost: whether a node of it is gone, as the cluster says.
        kind: of the verdict about it ("killed", "exception", ...); "" if there is none.
        classified: what the end of its log says ("host_oom", "xid", ...); "" if nothing.
        node: which node the verdict names; "" if none.
        step: in which step; -1 if nobody knows.
        cause: in words.
        evidence: folder, below the run's.
        confidence: of the verdict, 0 to 1.
        after_s: how long ago its last process ended.
        unseen: whether it ended while no supervisor was there, and nobody knows how.
        unstarted: why a part of it could not be started; "" if all were.
    """

    code: int
    seen: bool = True
    finished: bool = False
    quorum: bool = False
    asked: bool = False
    node_lost: bool = False
    kind: str = ""
    classified: str = ""
    node: str = ""
    step: int = -1
    cause: str = ""
    evidence: str = ""
    confidence: float = 0.0
    after_s: float = 0.0
    unseen: bool = False
    unstarted: str = ""


@dataclass(frozen=True)
class Blame:
    """What follows from an end.

    Attributes:
        whose: "node": it gets no more work; "maybe": if it happens there again; "job": the same would come anywhere;
            "nobody".
        kind: of the failure, by which two are alike.
        fatal: whether starting again would only end so again.
        why: in words.
    """

    whose: Whose
    kind: str
    why: str
    fatal: bool = False


def blame(end: End) -> Blame:
    """Whose fault it was that a group ended."""
    why = end.cause or f"it exited {end.code}"
    if end.finished:
        return Blame("nobody", "finished", "finished")
    if end.quorum:
        return Blame("nobody", "quorum", why)
    if end.asked:
        return Blame("nobody", "left", why if end.cause else "it left as asked")
    if end.unstarted:
        return Blame("node" if end.node_lost else "nobody", "not started", end.unstarted)
    if end.unseen:
        return Blame("nobody", "unseen", "it ended while no supervisor was there")
    if end.code == 0:
        return Blame("job", "exit 0", "it ended with 0 before the run was finished")
    if end.kind == "behind":
        return Blame("nobody", "behind", why)
    if end.code == GAVE_UP:
        return Blame("nobody", "gave up", why)
    if end.code in (USAGE, REFUSED):
        kind = "usage" if end.code == USAGE else "refused"
        return Blame("job", kind, why, fatal=end.code == USAGE)
    if end.node_lost:
        return Blame("node", "node lost", why)
    if end.classified in HARDWARE:
        return Blame("node", end.classified, why)
    if end.kind in NODES and not end.seen and end.confidence >= SURE:
        return Blame("node", end.kind, why)
    if end.code == STOPPED:
        return Blame("job", end.kind or "stopped", why)
    if end.kind in ("exception", "job"):
        return Blame("job", "exception", why)
    if end.code in KILLED and end.kind not in SUSPECT:
        return Blame("maybe", end.classified or "killed", end.cause or "it was killed by SIGKILL")
    if end.kind in SUSPECT or end.code in (FENCED, ORPHANED) or end.code < 0 or end.code > 128:
        return Blame("maybe", end.classified or end.kind or f"exit {end.code}", why)
    return Blame("job", end.classified or f"exit {end.code}", why)
