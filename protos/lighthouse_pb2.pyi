from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Term(_message.Message):
    __slots__ = ("number", "lighthouse")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LIGHTHOUSE_FIELD_NUMBER: _ClassVar[int]
    number: int
    lighthouse: str
    def __init__(self, number: _Optional[int] = ..., lighthouse: _Optional[str] = ...) -> None: ...

class Epoch(_message.Message):
    __slots__ = ("number", "term")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    number: int
    term: Term
    def __init__(self, number: _Optional[int] = ..., term: _Optional[_Union[Term, _Mapping]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    step: int
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("group", "incarnation", "manager", "ranks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    group: str
    incarnation: str
    manager: str
    ranks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., incarnation: _Optional[str] = ..., manager: _Optional[str] = ..., ranks: _Optional[_Iterable[str]] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("epoch", "members", "base", "speeds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    members: _containers.RepeatedCompositeFieldContainer[Member]
    base: Epoch
    speeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., base: _Optional[_Union[Epoch, _Mapping]] = ..., speeds: _Optional[_Iterable[int]] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("epoch", "base", "like", "without", "more", "packed", "speeds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    LIKE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    base: Epoch
    like: Epoch
    without: _containers.RepeatedScalarFieldContainer[str]
    more: _containers.RepeatedCompositeFieldContainer[Member]
    packed: bytes
    speeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., base: _Optional[_Union[Epoch, _Mapping]] = ..., like: _Optional[_Union[Epoch, _Mapping]] = ..., without: _Optional[_Iterable[str]] = ..., more: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., packed: _Optional[bytes] = ..., speeds: _Optional[_Iterable[int]] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class FromManager(_message.Message):
    __slots__ = ("hello", "join", "beat", "promise", "failed", "died", "leave", "finished", "query", "lost", "unbuilt", "acknowledged", "left")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    UNBUILT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    join: Join
    beat: Beat
    promise: Promise
    failed: Failed
    died: Died
    leave: Leave
    finished: Finished
    query: Query
    lost: Lost
    unbuilt: Unbuilt
    acknowledged: Acknowledged
    left: Left
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., promise: _Optional[_Union[Promise, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., died: _Optional[_Union[Died, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., unbuilt: _Optional[_Union[Unbuilt, _Mapping]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ...) -> None: ...

class ToManager(_message.Message):
    __slots__ = ("welcome", "refused", "prepare", "activate", "fence", "stop", "waiting", "stands", "copy", "heal", "ask", "unknown", "drain", "outside")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    prepare: Prepare
    activate: Activate
    fence: Fence
    stop: Stop
    waiting: Waiting
    stands: Stands
    copy: Copy
    heal: Heal
    ask: Ask
    unknown: Unknown
    drain: Drain
    outside: Outside
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., activate: _Optional[_Union[Activate, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., stands: _Optional[_Union[Stands, _Mapping]] = ..., copy: _Optional[_Union[Copy, _Mapping]] = ..., heal: _Optional[_Union[Heal, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., unknown: _Optional[_Union[Unknown, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., outside: _Optional[_Union[Outside, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("job", "group", "incarnation", "manager", "groups", "minimum", "start_window_s", "acknowledged", "known", "prepared", "promised", "follows", "place", "died", "by_speed", "spares", "role", "seen", "evicts_slow", "quorum_wait_s", "outage_budget_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    START_WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    BY_SPEED_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    EVICTS_SLOW_FIELD_NUMBER: _ClassVar[int]
    QUORUM_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    OUTAGE_BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: str
    incarnation: str
    manager: str
    groups: int
    minimum: int
    start_window_s: float
    acknowledged: Term
    known: Roster
    prepared: _containers.RepeatedCompositeFieldContainer[Roster]
    promised: int
    follows: bool
    place: int
    died: Died
    by_speed: bool
    spares: int
    role: str
    seen: Roster
    evicts_slow: bool
    quorum_wait_s: float
    outage_budget_s: float
    def __init__(self, job: _Optional[str] = ..., group: _Optional[str] = ..., incarnation: _Optional[str] = ..., manager: _Optional[str] = ..., groups: _Optional[int] = ..., minimum: _Optional[int] = ..., start_window_s: _Optional[float] = ..., acknowledged: _Optional[_Union[Term, _Mapping]] = ..., known: _Optional[_Union[Roster, _Mapping]] = ..., prepared: _Optional[_Iterable[_Union[Roster, _Mapping]]] = ..., promised: _Optional[int] = ..., follows: _Optional[bool] = ..., place: _Optional[int] = ..., died: _Optional[_Union[Died, _Mapping]] = ..., by_speed: _Optional[bool] = ..., spares: _Optional[int] = ..., role: _Optional[str] = ..., seen: _Optional[_Union[Roster, _Mapping]] = ..., evicts_slow: _Optional[bool] = ..., quorum_wait_s: _Optional[float] = ..., outage_budget_s: _Optional[float] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: Term
    def __init__(self, term: _Optional[_Union[Term, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("ranks", "signature", "fingerprint", "step")
    class SignatureEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[str]
    signature: _containers.ScalarMap[str, str]
    fingerprint: str
    step: int
    def __init__(self, ranks: _Optional[_Iterable[str]] = ..., signature: _Optional[_Mapping[str, str]] = ..., fingerprint: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("epoch", "step", "phase", "waiting_ms", "stopped_ms", "microbatch_us", "total", "slowest", "wait_us", "overdue", "ranks", "borne_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_MS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BORNE_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    phase: str
    waiting_ms: int
    stopped_ms: int
    microbatch_us: int
    total: int
    slowest: int
    wait_us: int
    overdue: Overdue
    ranks: _containers.RepeatedCompositeFieldContainer[Doing]
    borne_ms: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., waiting_ms: _Optional[int] = ..., stopped_ms: _Optional[int] = ..., microbatch_us: _Optional[int] = ..., total: _Optional[int] = ..., slowest: _Optional[int] = ..., wait_us: _Optional[int] = ..., overdue: _Optional[_Union[Overdue, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[Doing, _Mapping]]] = ..., borne_ms: _Optional[int] = ...) -> None: ...

class Overdue(_message.Message):
    __slots__ = ("rank", "phase", "idle_ms", "deadline_ms", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    phase: str
    idle_ms: int
    deadline_ms: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., phase: _Optional[str] = ..., idle_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Doing(_message.Message):
    __slots__ = ("ranks", "phase", "step", "idle_ms", "waiting_ms", "stopped_ms")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_MS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    phase: str
    step: int
    idle_ms: int
    waiting_ms: int
    stopped_ms: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., idle_ms: _Optional[int] = ..., waiting_ms: _Optional[int] = ..., stopped_ms: _Optional[int] = ...) -> None: ...

class Promise(_message.Message):
    __slots__ = ("epoch", "known", "prepared", "last", "held", "total", "healed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    HEALED_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    known: Roster
    prepared: _containers.RepeatedCompositeFieldContainer[Roster]
    last: Entry
    held: _containers.RepeatedScalarFieldContainer[int]
    total: int
    healed: bool
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., known: _Optional[_Union[Roster, _Mapping]] = ..., prepared: _Optional[_Iterable[_Union[Roster, _Mapping]]] = ..., last: _Optional[_Union[Entry, _Mapping]] = ..., held: _Optional[_Iterable[int]] = ..., total: _Optional[int] = ..., healed: _Optional[bool] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("epoch", "step", "error", "suspects")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    step: int
    error: str
    suspects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., step: _Optional[int] = ..., error: _Optional[str] = ..., suspects: _Optional[_Iterable[str]] = ...) -> None: ...

class UserError(_message.Message):
    __slots__ = ("step", "kind", "message", "where")
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    step: int
    kind: str
    message: str
    where: str
    def __init__(self, step: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., where: _Optional[str] = ...) -> None: ...

class Died(_message.Message):
    __slots__ = ("cause", "rank", "phase", "step", "error", "asked")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    cause: str
    rank: int
    phase: str
    step: int
    error: UserError
    asked: bool
    def __init__(self, cause: _Optional[str] = ..., rank: _Optional[int] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., error: _Optional[_Union[UserError, _Mapping]] = ..., asked: _Optional[bool] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    step: int
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    step: int
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("term", "lease_ms", "beat_ms")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    BEAT_MS_FIELD_NUMBER: _ClassVar[int]
    term: Term
    lease_ms: int
    beat_ms: int
    def __init__(self, term: _Optional[_Union[Term, _Mapping]] = ..., lease_ms: _Optional[int] = ..., beat_ms: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "retry")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retry: bool
    def __init__(self, reason: _Optional[str] = ..., retry: _Optional[bool] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("epoch", "base", "planned", "why")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    base: Epoch
    planned: Roster
    why: str
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., base: _Optional[_Union[Epoch, _Mapping]] = ..., planned: _Optional[_Union[Roster, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("group", "microbatches")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    group: str
    microbatches: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., microbatches: _Optional[_Iterable[int]] = ...) -> None: ...

class Donor(_message.Message):
    __slots__ = ("group", "donor")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    group: str
    donor: str
    def __init__(self, group: _Optional[str] = ..., donor: _Optional[str] = ...) -> None: ...

class Activate(_message.Message):
    __slots__ = ("membership", "first_step", "total", "shares", "donors", "entry", "cause")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    membership: Roster
    first_step: int
    total: int
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    donors: _containers.RepeatedCompositeFieldContainer[Donor]
    entry: Entry
    cause: str
    def __init__(self, membership: _Optional[_Union[Roster, _Mapping]] = ..., first_step: _Optional[int] = ..., total: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., donors: _Optional[_Iterable[_Union[Donor, _Mapping]]] = ..., entry: _Optional[_Union[Entry, _Mapping]] = ..., cause: _Optional[str] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "ok", "keep", "quorum_lost")
    REASON_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_LOST_FIELD_NUMBER: _ClassVar[int]
    reason: str
    ok: bool
    keep: str
    quorum_lost: bool
    def __init__(self, reason: _Optional[str] = ..., ok: _Optional[bool] = ..., keep: _Optional[str] = ..., quorum_lost: _Optional[bool] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("whom", "why", "since_ms")
    WHOM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    whom: _containers.RepeatedScalarFieldContainer[str]
    why: str
    since_ms: int
    def __init__(self, whom: _Optional[_Iterable[str]] = ..., why: _Optional[str] = ..., since_ms: _Optional[int] = ...) -> None: ...

class Stands(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class Unbuilt(_message.Message):
    __slots__ = ("epoch", "error")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    error: str
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason", "deadline_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    deadline_ms: int
    def __init__(self, reason: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Outside(_message.Message):
    __slots__ = ("membership", "why")
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    membership: Roster
    why: str
    def __init__(self, membership: _Optional[_Union[Roster, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class Unknown(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    step: int
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Heal(_message.Message):
    __slots__ = ("step", "donors", "why")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    step: int
    donors: _containers.RepeatedCompositeFieldContainer[Member]
    why: str
    def __init__(self, step: _Optional[int] = ..., donors: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., why: _Optional[str] = ...) -> None: ...

class FenceGroupRequest(_message.Message):
    __slots__ = ("group", "by", "incarnation", "check")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    group: str
    by: str
    incarnation: str
    check: bool
    def __init__(self, group: _Optional[str] = ..., by: _Optional[str] = ..., incarnation: _Optional[str] = ..., check: _Optional[bool] = ...) -> None: ...

class FenceGroupReply(_message.Message):
    __slots__ = ("incarnation", "gone_ms", "heard_ms", "refused")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GONE_MS_FIELD_NUMBER: _ClassVar[int]
    HEARD_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    gone_ms: int
    heard_ms: int
    refused: str
    def __init__(self, incarnation: _Optional[str] = ..., gone_ms: _Optional[int] = ..., heard_ms: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class DrainGroupRequest(_message.Message):
    __slots__ = ("group", "by", "incarnation", "deadline_ms", "check")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    group: str
    by: str
    incarnation: str
    deadline_ms: int
    check: bool
    def __init__(self, group: _Optional[str] = ..., by: _Optional[str] = ..., incarnation: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., check: _Optional[bool] = ...) -> None: ...

class DrainGroupReply(_message.Message):
    __slots__ = ("incarnation", "here", "left", "how")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    here: bool
    left: bool
    how: str
    def __init__(self, incarnation: _Optional[str] = ..., here: _Optional[bool] = ..., left: _Optional[bool] = ..., how: _Optional[str] = ...) -> None: ...

class FindManagerRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class FindManagerReply(_message.Message):
    __slots__ = ("manager", "incarnation")
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    manager: str
    incarnation: str
    def __init__(self, manager: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("group", "incarnation", "state", "phase", "step", "silent_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    incarnation: str
    state: str
    phase: str
    step: int
    silent_ms: int
    def __init__(self, group: _Optional[str] = ..., incarnation: _Optional[str] = ..., state: _Optional[str] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., silent_ms: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("job", "term", "membership", "groups", "waiting", "stopped", "reigns", "members_in_touch", "ended")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    REIGNS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_IN_TOUCH_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    job: str
    term: Term
    membership: Membership
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    waiting: str
    stopped: str
    reigns: bool
    members_in_touch: int
    ended: str
    def __init__(self, job: _Optional[str] = ..., term: _Optional[_Union[Term, _Mapping]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., waiting: _Optional[str] = ..., stopped: _Optional[str] = ..., reigns: _Optional[bool] = ..., members_in_touch: _Optional[int] = ..., ended: _Optional[str] = ...) -> None: ...
