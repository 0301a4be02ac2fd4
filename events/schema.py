"""What may stand in an event log: one frozen class per kind of event, told apart by `kind`.

Every line has the same header (class `Event`): who wrote it, when, and in what order. `group` and
`incarnation` name the group that the event is *about*; where an event does not say, the writer fills in its
own. `process` says who wrote it.

Versions: a new field with a default keeps `v`; anything an old reader would misread raises it. A reader keeps
kinds and versions that it does not know as `Unknown`, so old tools can read new logs.
"""

from __future__ import annotations

from typing import Any

from lightkeeper.events.header import SCHEMA_VERSION, Event
from lightkeeper.events.of_checkpoints import (
    CheckpointFailed,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointSkipped,
    StopRequested,
)
from lightkeeper.events.of_progress import KINDS as OF_PROGRESS
from lightkeeper.events.of_supervisor import KINDS as OF_SUPERVISOR

__all__ = ["BY_NAME", "KINDS", "SCHEMA_VERSION", "Event", "kind_of"]  # and every kind

# --- a run and its processes --------------------------------------------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True):
    """The settings under which the run was started. `settings` is plain JSON."""

    settings: dict[str, Any] = {}


class ProcessStarted(Event, frozen=True, kw_only=True):
    """The writer has started, or (with `child`) has started another process. `listens`: a manager's address."""

    command: str = ""
    child: int | None = None
    listens: str = ""


class ProcessEnded(Event, frozen=True, kw_only=True):
    """A process has ended; `exit_code` is negative for a signal, as in `subprocess`."""

    exit_code: int
    child: int | None = None
    rank: int | None = None


class JobStopped(Event, frozen=True, kw_only=True):
    """The job ends here, well (`ok`) or with its first cause; `keep`, if any, saves its last committed step."""

    reason: str
    ok: bool
    keep: str = ""


class Finished(Event, frozen=True, kw_only=True):
    """The group has reached the end of the run; `step` is the number of steps committed.

    A rank's own line also carries the fingerprint of its last state.
    """

    step: int
    fingerprint: str = ""


class Left(Event, frozen=True, kw_only=True):
    """The group has left as it was asked to: in good order (said by its rank), or at once (said by the lighthouse)."""

    reason: str = ""


# --- membership ---------------------------------------------------------------------------------------------


class Joined(Event, frozen=True, kw_only=True):
    """A group asked to join and was taken on.

    Attributes:
        signature: digest of what must agree between groups.
        step: how many steps the state has behind it with which it comes.
    """

    signature: str = ""
    fingerprint: str = ""
    step: int = 0


class Refused(Event, frozen=True, kw_only=True):
    """A group (or peer) was turned away; `reason` names the difference."""

    reason: str


class Prepared(Event, frozen=True, kw_only=True):
    """An epoch was prepared on `base`. `change` is "planned" or "recovery"."""

    epoch: int
    term: int = 0
    base: int | None = None
    members: tuple[str, ...] = ()
    change: str = "planned"
    why: str = ""


class Promised(Event, frozen=True, kw_only=True):
    """A manager has promised: lower epochs are over for it. `step`: its last committed one (-1: none)."""

    epoch: int
    term: int = 0
    step: int = -1


class Activated(Event, frozen=True, kw_only=True):
    """An epoch is in force from `first_step` on. `shares`: the microbatches of `first_step`, by group.

    A planned epoch (`cause` "planned") comes into force by the entries; `first_step` is then the step of the first
    beat that shows it, so it may be a little late. `rejoined` has the exact step. `spares`: the members that compute
    nothing.
    """

    epoch: int
    first_step: int
    term: int = 0
    members: tuple[str, ...] = ()
    shares: dict[str, tuple[int, ...]] = {}
    cause: str = ""
    spares: tuple[str, ...] = ()


class Promoted(Event, frozen=True, kw_only=True):
    """A spare works from `step` of this epoch on (of a planned one `step` may be a little late, as in `activated`)."""

    epoch: int
    step: int
    term: int = 0


class Parked(Event, frozen=True, kw_only=True):
    """The job has no use for a group now; it waits until one is lost."""

    why: str


class Waiting(Event, frozen=True, kw_only=True):
    """Something waits; said once per interval. `since_s`: for how long already."""

    whom: str
    since_s: float
    why: str = ""


class Overlap(Event, frozen=True, kw_only=True):
    """What the reducer has learnt about overlapping reduction with backward."""

    note: str
    step: int = -1


# --- steps --------------------------------------------------------------------------------------------------


class Committed(Event, frozen=True, kw_only=True):
    """One rank has committed one step.

    Attributes:
        step: index of the entry.
        epoch: epoch in the entry's name (for an adopted entry: the donor's).
        term: term in the entry's name.
        rank: rank within the group.
        total: M, the number of microbatches of the step over all groups.
        microbatches: those of them that this group put into the entry.
        computed: forward passes this rank ran for the step over all attempts; more than `microbatches` means
            that work was done twice. None: not counted.
        counted: number of microbatches that the entry itself says it holds (the runtime's own extra).
        seconds: from the previous commit's end to this one's.
        wait_s: of these, time standing in the reduce, the vote or a recovery.
        tokens: tokens in the whole entry.
        loss: loss of the whole entry.
        fingerprint: of the state after the step, if one was taken.
        live: false while replaying or following.
        attempts: tries at this step, 1 without a fault.
        extras: the reduced extras that are single numbers.
    """

    step: int
    epoch: int
    term: int = 0
    rank: int = 0
    total: int = 0
    microbatches: tuple[int, ...] = ()
    computed: int | None = None
    counted: int | None = None
    seconds: float = 0.0
    wait_s: float = 0.0
    tokens: float | None = None
    loss: float | None = None
    fingerprint: str | None = None
    live: bool = True
    attempts: int = 1
    extras: dict[str, float] = {}


class Adopted(Event, frozen=True, kw_only=True):
    """A group one step behind took the entry (step, epoch) from a donor and committed it."""

    step: int
    epoch: int
    term: int = 0
    donor: str = ""
    bytes: int = 0
    rank: int = 0


class Diverged(Event, frozen=True, kw_only=True):
    """At the end of the run the groups do not hold the same parameters and optimizer state: this rank's digest."""

    step: int
    fingerprint: str = ""


class SettingsDiffer(Event, frozen=True, kw_only=True):
    """In the entry of this step the groups' optimizers do not have the same settings: their states go apart."""

    step: int


class Healing(Event, frozen=True, kw_only=True):
    """A joiner was told to fetch the state as of the boundary before `step`; `attempt` counts from 1."""

    step: int
    attempt: int = 1


class HealFailed(Event, frozen=True, kw_only=True):
    """A joiner cannot go on from what it has; it is given another boundary."""

    reason: str


class BuildFailed(Event, frozen=True, kw_only=True):
    """The process groups of a planned epoch could not be built in `group`; it is prepared anew."""

    epoch: int
    term: int
    members: tuple[str, ...]
    error: str


class Copied(Event, frozen=True, kw_only=True):
    """A member copies its state for a joiner; `pause_s` is what that cost its training thread at the boundary."""

    step: int
    pause_s: float
    rank: int = 0


class Healed(Event, frozen=True, kw_only=True):
    """A joiner has the state as of the boundary before `step`, verified."""

    step: int
    bytes: int
    seconds: float
    donors: int = 0
    fingerprint: str = ""
    rank: int = 0


class Rejoined(Event, frozen=True, kw_only=True):
    """The joiner's group is a member from `step` on."""

    step: int
    rank: int = 0


class Recovered(Event, frozen=True, kw_only=True):
    """A rank has committed a step that an earlier epoch failed at.

    Attributes:
        further: orphaned microbatches dealt to this group on top of those it had.
        stall_s: time from the failure to the repeated reduce, computing `further` not counted.
    """

    step: int
    epoch: int
    term: int = 0
    rank: int = 0
    further: tuple[int, ...] = ()
    stall_s: float = 0.0


# --- faults -------------------------------------------------------------------------------------------------


class FaultInjected(Event, frozen=True, kw_only=True):
    """A test, bench or demo is about to break something: written before it happens.

    Attributes:
        fault: "kill", "kill-tree", "freeze", "raise", ...
        phase: "compute", "reduce", "vote", "apply", ...
        target: the process that is hit: "rank g1/0", "manager g1".
    """

    fault: str
    phase: str
    step: int
    target: str = ""


class GroupLost(Event, frozen=True, kw_only=True):
    """A group is held to be gone.

    Attributes:
        cause: what happened to it: "exit", "signal 9", "frozen", "silent", "no progress", ...
        detected_by: "manager", "stream", "lease", "progress", ...
        evidence: what was seen, in words.
        phase: its phase when last seen.
        step: its step when last seen.
        rank: the rank that it is about, -1 if no single one.
        since_s: for how long before this line it had been so, in seconds.
    """

    cause: str
    detected_by: str
    evidence: str = ""
    phase: str = ""
    step: int = -1
    rank: int = -1
    since_s: float = 0.0


class LastPhases(Event, frozen=True, kw_only=True):
    """What the ranks of all members did when the lighthouse last heard of them; written when a recovery begins.

    Attributes:
        epoch: the recovery's.
        phases: by group, in words: "ranks 0-2 reduce of step 12 for 0.4 s, rank 3 compute of step 12 for 3.1 s".
        silent_s: by group, seconds since it was last heard.
    """

    epoch: int
    term: int = 0
    phases: dict[str, str] = {}
    silent_s: dict[str, float] = {}


class Evidence(Event, frozen=True, kw_only=True):
    """What was kept of an incident before anything was aborted or killed.

    Attributes:
        folder: where, below the run's folder.
        reason: what it was taken for.
        log_class: the cause that the last lines of its ranks' logs tell (`lightkeeper diagnose`), and in which words.
        taken: size in bytes by name: "stacks-rank0", "recorder-rank0", "log-rank0", "kernel", ...
        missing: by name, why there is none.
        seconds: what taking it took.
        recorder: what the flight recorders say, compared: which collective, who is missing; empty if nothing.
    """

    folder: str
    reason: str = ""
    log_class: str = ""
    taken: dict[str, int] = {}
    missing: dict[str, str] = {}
    seconds: float = 0.0
    recorder: str = ""


class ReduceFailed(Event, frozen=True, kw_only=True):
    """A reduce failed here; the one who reports is usually a victim."""

    step: int
    epoch: int
    term: int = 0
    rank: int = 0
    suspects: tuple[str, ...] = ()
    error: str = ""


class Fenced(Event, frozen=True, kw_only=True):
    """The ranks of an incarnation were killed so that nothing it still does has an effect."""

    reason: str


class OperatorFenced(Event, frozen=True, kw_only=True):
    """The operator has said that the processes of this incarnation are gone; `by`: who, and from where."""

    by: str


class OperatorDrained(Event, frozen=True, kw_only=True):
    """The operator has asked this incarnation to leave, within `deadline_s` if that is given; `by`: who, from where."""

    by: str
    deadline_s: float | None = None


class OperatorWordVoid(Event, frozen=True, kw_only=True):
    """The operator's word against this incarnation is set aside: `epoch` is newer, and was formed with it."""

    epoch: int
    term: int = 0


class TookOver(Event, frozen=True, kw_only=True):
    """A lighthouse whose log did not hold the epoch reigns from now on: nobody obeys another any more."""

    epoch: int
    term: int = 0
    members: tuple[str, ...] = ()


class UserError(Event, frozen=True, kw_only=True):
    """The user's code raised; fatal for this group."""

    rank: int
    step: int
    type: str
    message: str
    traceback: str = ""


class Unauthorised(Event, frozen=True, kw_only=True):
    """A call or connection without the job's token was refused."""

    peer: str
    what: str


class EventsDropped(Event, frozen=True, kw_only=True):
    """This many events could not be written (full disk, folder gone) before this line."""

    count: int


class Unknown(Event, frozen=True, kw_only=True):
    """A line whose kind, version or shape this reader does not know; `raw` is the whole line as JSON."""

    name: str = ""
    raw: dict[str, Any] = {}


KINDS: tuple[type[Event], ...] = (
    RunStarted, ProcessStarted, ProcessEnded, JobStopped, Finished, Left,
    Joined, Refused, Prepared, Promised, Activated, Promoted, Parked, Waiting, Overlap,
    Committed, Adopted, Recovered, Healing, HealFailed, BuildFailed, Copied, Healed, Rejoined, Diverged, SettingsDiffer,
    FaultInjected, GroupLost, LastPhases, *OF_PROGRESS, Evidence, ReduceFailed,
    Fenced, OperatorDrained, OperatorFenced, OperatorWordVoid,
    TookOver, UserError, Unauthorised,
    CheckpointSaved, CheckpointFailed, CheckpointSkipped, CheckpointLoaded, StopRequested,
    *OF_SUPERVISOR,
    EventsDropped,
)  # fmt: skip

BY_NAME: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in KINDS}


def kind_of(event: Event) -> str:
    """The event's `kind` as it stands in the file, for instance "group_lost"."""
    return event.name if isinstance(event, Unknown) else str(type(event).__struct_config__.tag)
