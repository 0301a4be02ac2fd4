"""The kinds of events about progress: who is watched for it, who makes none, and who makes less than the others."""

from __future__ import annotations

from lightkeeper.events.header import Event


class Armed(Event, frozen=True, kw_only=True):
    """A manager watches the progress of its ranks, with these deadlines in seconds by phase; `learnt`: from its run."""

    deadlines: dict[str, float]
    learnt: bool = False


class Stuck(Event, frozen=True, kw_only=True):
    """A rank lives and has made no progress for longer than the deadline of its phase.

    Attributes:
        since_s: seconds without progress.
        deadline_s: what was borne.
        how: how the deadline came about: "learnt from 40 microbatches", "declared", "nothing is learnt yet".
        state: of its process: "running", "sleeping", "stopped".
    """

    rank: int
    phase: str
    step: int
    since_s: float
    deadline_s: float
    how: str = ""
    state: str = ""


class Slow(Event, frozen=True, kw_only=True):
    """A group has been slower than the others for a whole window of steps.

    Attributes:
        rank: its slowest.
        node: host of that rank, "" if not known.
        factor: its time for a microbatch, against the median of all groups.
        costs: share of everybody's time that it costs, 0 to 1, as the work is dealt now.
        steps: length of the window.
        wait_s: what it waits for the others in a step, in seconds; the one that is slow waits least.
        others_wait_s: median of the others' waiting.
        flaps: how often it was slow and was not again, lately.
        done: "reported", or "asked to leave".
    """

    rank: int
    factor: float
    costs: float
    steps: int
    step: int = -1
    node: str = ""
    wait_s: float = 0.0
    others_wait_s: float = 0.0
    flaps: int = 0
    done: str = "reported"


class SlowEnded(Event, frozen=True, kw_only=True):
    """A group that was slow has been as fast as the others for a whole window of steps."""

    step: int = -1


class Quarantined(Event, frozen=True, kw_only=True):
    """A node should get no more work before somebody has looked at it: `reason` and `evidence` in words."""

    node: str
    reason: str
    evidence: str = ""


KINDS: tuple[type[Event], ...] = (Armed, Stuck, Slow, SlowEnded, Quarantined)
