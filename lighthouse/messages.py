"""What a manager and the lighthouse say to each other. Field names are those of ``protos/lighthouse.proto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightkeeper.lighthouse.names import Entry, Epoch, Member, Membership, Term

# ---------------------------------------------------------------- manager to lighthouse


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a stream: who speaks, and the newest that it knows.

    Attributes:
        groups: configured number of groups of the job.
        minimum: fewest groups with which the job goes on.
        spares: how many of `groups` are to compute nothing as long as the others are there.
        role: as in `Settings`.
        start_window_s: word of whoever creates the job: after so long the first epoch may start with `minimum`
            groups; 0 means that it needs all of them.
        acknowledged: highest term this manager has acknowledged.
        known: newest membership in force that this manager knows, also if it has left it.
        prepared: memberships prepared on top of `known`.
        follows: whether it is a joiner that has healed and applies the members' entries.
        promised: highest epoch number this manager has promised; above `known` if a recovery was interrupted.
        place: of this lighthouse in the manager's list of addresses, from 1; 0 if it has no other address.
        seen: the newest membership that this manager was told of without ever having been a member.
        died: the group is over, and no lighthouse was there to be told; nothing else follows on the stream.
        by_speed: whether work is dealt by speed; else all work alike. The same in all groups of a job.
        evicts_slow: whether a group that is slow for long is asked to leave, where that pays.
        quorum_wait_s: for how long the job may stand below its minimum before it ends, and is kept; None: not said.
        outage_budget_s: for how long the group waits in a running job before it gives up by itself; None: not said.
    """

    job: str
    group: str
    incarnation: str
    manager: str
    groups: int
    minimum: int
    start_window_s: float = 0.0
    acknowledged: Term | None = None
    known: Membership | None = None
    prepared: tuple[Membership, ...] = ()
    promised: int = 0
    follows: bool = False
    place: int = 0
    died: Died | None = None
    by_speed: bool = False
    spares: int = 0
    role: str = "member"
    seen: Membership | None = None
    evicts_slow: bool = False
    quorum_wait_s: float | None = None
    outage_budget_s: float | None = None

    @property
    def members(self) -> int:
        """How many groups are to work."""
        return self.groups - self.spares


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Answer to `Welcome`: this manager obeys this term, and nothing lower any more."""

    term: Term


@dataclass(frozen=True, slots=True)
class Join:
    """All ranks of the group have registered; it can be a member.

    Attributes:
        ranks: addresses of the ranks' transfer servers by rank index.
        signature: what must be alike in all groups (parameters, optimizer, microbatches, ...), name to value.
        fingerprint: of the state with which it comes; groups that start with another heal from the lowest slot.
        step: how many steps that state has behind it: 0, or what `Manager.resume` was told.
    """

    ranks: tuple[str, ...]
    signature: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class Overdue:
    """A rank that lives and has done nothing new for longer than the deadline of its phase."""

    rank: int
    phase: str
    idle_ms: int
    deadline_ms: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Doing:
    """What some ranks of a group do, for how long the one that waits (is stopped, does nothing new) longest has."""

    ranks: tuple[int, ...]
    phase: str
    step: int
    idle_ms: int = 0
    waiting_ms: int = 0
    stopped_ms: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """Proof of life and progress of a group.

    Attributes:
        epoch: number of the epoch in force for this manager, 0 before the first.
        step: next step to be committed.
        phase: what the group's slowest rank does.
        waiting_ms: how long the group has been standing in a reduce, 0 if it does not stand.
        stopped_ms: how long a rank has been stopped (frozen by a signal) without beating, 0 if none is.
        microbatch_us: microseconds that its slowest rank takes for a microbatch, 0 if that is not known.
        total: microbatches of the step, over all groups.
        slowest: the rank that takes so long.
        wait_us: microseconds that the group waits for the others in a step; that of the rank that waits least.
        overdue: the rank that has made no progress for longest beyond its deadline, None if none has.
        ranks: what all ranks do, those that do the same together.
        borne_ms: the shortest time for which the group bears that a rank makes no progress; 0: not said.
    """

    epoch: int
    step: int
    phase: str
    waiting_ms: int = 0
    stopped_ms: int = 0
    microbatch_us: int = 0
    total: int = 0
    slowest: int = 0
    wait_us: int = 0
    overdue: Overdue | None = None
    ranks: tuple[Doing, ...] = ()
    borne_ms: int = 0


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer to a recovery's `Prepare`: every lower epoch is over for me, I commit nothing more in one.

    Attributes:
        epoch: the promised epoch.
        known: newest membership that this manager knows.
        prepared: memberships prepared on top of it.
        last: name of the newest entry that the group has committed; an `origin` if it has none and was started with a
            later state than that before step 0.
        held: microbatches dealt to the group for the step after `last`.
        total: number of microbatches of that step.
        healed: whether its state came from other groups, and is not the one with which it joined.
    """

    epoch: Epoch
    known: Membership | None = None
    prepared: tuple[Membership, ...] = ()
    last: Entry | None = None
    held: tuple[int, ...] = ()
    total: int = 0
    healed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A reduce, a formation or a fetch of this epoch failed here; the epoch is over.

    Attributes:
        suspects: groups whose connection broke; the sender itself if the error is its own.
    """

    epoch: Epoch
    step: int
    error: str
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UserError:
    """An exception that started in the user's code."""

    step: int
    kind: str
    message: str
    where: str

    def alike(self, other: UserError) -> bool:
        """Whether both are one bug: same step, type, message and place."""
        return self == other


@dataclass(frozen=True, slots=True)
class Died:
    """The group is over: said by its manager, which has fenced (killed) all of its ranks.

    Attributes:
        cause: for instance ``rank 0 was killed by SIGKILL``.
        rank: which of them died first; -1: it is about no single one.
        phase: last phase of that rank.
        error: the user's exception, if that was the cause.
        asked: whether somebody asked for it (a second signal, a deadline that passed): nobody is to blame.
    """

    cause: str
    rank: int
    phase: str
    step: int
    error: UserError | None = None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """The group asks to leave at a step boundary."""

    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """The entry before `step` has put an epoch in force that does not have this group: it has left in good order."""

    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The closing reduce after the last step completed here: that step is final for every member."""

    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Query:
    """Asked after a gap longer than the lease in the manager's own clock: does my epoch still stand?"""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Lost:
    """The joiner cannot go on from what it has (donors gone, an entry missing): it needs another snapshot."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """The process groups of this planned epoch cannot be built here: it is to be prepared anew, or not at all."""

    epoch: Epoch
    error: str


ToLighthouse = (
    Acknowledged | Unbuilt | Lost | Hello | Join | Beat | Promise | Failed | Died | Leave | Left | Finished | Query
)

# ---------------------------------------------------------------- lighthouse to manager


@dataclass(frozen=True, slots=True)
class Welcome:
    """The stream is accepted."""

    term: Term
    lease_ms: int
    beat_ms: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The group cannot be a member now.

    Attributes:
        retry: whether that may change within the outage budget; if not, the group ends with the reason.
    """

    reason: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Prepare:
    """Asks to prepare an epoch.

    Attributes:
        base: the epoch that it follows.
        planned: its membership if the change is planned; None for a recovery, which asks for a promise.
        why: those who leave do, for the logs of those who stay.
    """

    epoch: Epoch
    base: Epoch | None = None
    planned: Membership | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """Microbatches of the first step of an epoch that belong to a group."""

    group: str
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Donor:
    """`group` missed the newest entry and fetches it from `donor`, rank by rank."""

    group: str
    donor: str


@dataclass(frozen=True, slots=True)
class Activate:
    """A recovery's result: the epoch is in force.

    Attributes:
        first_step: one past the highest step a promiser committed.
        total: microbatches of the first step.
        shares: of all members, as the lighthouse decides it; each is told its own.
        entry: the newest entry, which donors hold and the groups named in `donors` fetch.
        cause: why the epoch before it ended.
    """

    membership: Membership
    first_step: int
    total: int
    shares: tuple[Share, ...]
    donors: tuple[Donor, ...] = ()
    entry: Entry | None = None
    cause: str = ""

    def for_one(self, group: str) -> Activate:
        """What is said to one of its members: of shares and donors its own."""
        slot = self.membership.slot_of(group)
        mine = () if slot is None else self.shares[slot : slot + 1]
        if not mine or mine[0].group != group:
            mine = tuple(share for share in self.shares if share.group == group)
        return replace(self, shares=mine, donors=tuple(donor for donor in self.donors if donor.group == group))


@dataclass(frozen=True, slots=True)
class Fence:
    """This incarnation was left out: its manager kills its ranks; nothing it did after has an effect."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The job ends; `ok` tells whether the group exits 0.

    Attributes:
        keep: the one group that saves its last committed state before it ends; said to no other incarnation of it.
        quorum_lost: too few groups are left, and nothing else is wrong: they may be started again as they are.
    """

    reason: str
    ok: bool
    keep: str = ""
    quorum_lost: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Said once per interval while something waits: for whom and why."""

    whom: tuple[str, ...]
    why: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Stands:
    """Answer to `Query`: the epoch still stands."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Ask:
    """Somebody waits for this group: is it still there? It answers with a beat, at once."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The operator asks the group to leave.

    Attributes:
        deadline_ms: after which it ends at once; 0: none.
    """

    reason: str
    deadline_ms: int = 0


QUORUM_LOST = "quorum lost"  # so begins the reason why a job ends of which too few groups are left
FIRST_EPOCH = "first epoch"  # so begins the cause of an activation that has no epoch before it
RELEASE = 1 << 63  # 0 is a boundary: that before the first step


@dataclass(frozen=True, slots=True)
class Copy:
    """Members copy their state as of the boundary before `step`, and keep the entries from there on.

    Attributes:
        step: the boundary, named ahead; who is past it is no donor. `RELEASE`: nobody needs the copy any more.
    """

    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class Heal:
    """A joiner fetches the state as of the boundary before `step` from these donors, then follows their entries."""

    step: int
    donors: tuple[Member, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The members of an epoch that a `Hello` named are not known here: say it again on a new stream, in full.

    A matter of the stream; the machines neither say nor hear it.
    """

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Outside:
    """The job runs without this group; said once on a stream, and when it changes.

    Attributes:
        membership: the newest epoch, so that the group can say to another lighthouse that there is one; None: the job
            that ran has ended.
        why: it is parked, in one line: it waits as long as it takes. Empty: it is to come in, like any joiner.
    """

    membership: Membership | None = None
    why: str = ""


ToManager = (
    Unknown
    | Ask
    | Copy
    | Heal
    | Welcome
    | Refused
    | Prepare
    | Activate
    | Fence
    | Stop
    | Waiting
    | Stands
    | Outside
    | Drain
)
