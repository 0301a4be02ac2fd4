from lightkeeper.protos import lighthouse_pb2 as _lighthouse_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Said(_message.Message):
    __slots__ = ("ranks", "message")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    message: bytes
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., message: _Optional[bytes] = ...) -> None: ...

class SaidMany(_message.Message):
    __slots__ = ("said",)
    SAID_FIELD_NUMBER: _ClassVar[int]
    said: _containers.RepeatedCompositeFieldContainer[Said]
    def __init__(self, said: _Optional[_Iterable[_Union[Said, _Mapping]]] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("hello", "said", "beat", "ended", "leave", "fenced", "lost")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    said: SaidMany
    beat: NodeBeat
    ended: RankEnded
    leave: AskedToLeave
    fenced: NodeFenced
    lost: NodeLost
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., said: _Optional[_Union[SaidMany, _Mapping]] = ..., beat: _Optional[_Union[NodeBeat, _Mapping]] = ..., ended: _Optional[_Union[RankEnded, _Mapping]] = ..., leave: _Optional[_Union[AskedToLeave, _Mapping]] = ..., fenced: _Optional[_Union[NodeFenced, _Mapping]] = ..., lost: _Optional[_Union[NodeLost, _Mapping]] = ...) -> None: ...

class ToNode(_message.Message):
    __slots__ = ("taken", "refused", "said", "alive", "ends")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    taken: NodeTaken
    refused: NodeRefused
    said: SaidMany
    alive: NodeAlive
    ends: GroupEnds
    def __init__(self, taken: _Optional[_Union[NodeTaken, _Mapping]] = ..., refused: _Optional[_Union[NodeRefused, _Mapping]] = ..., said: _Optional[_Union[SaidMany, _Mapping]] = ..., alive: _Optional[_Union[NodeAlive, _Mapping]] = ..., ends: _Optional[_Union[GroupEnds, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("group", "node_rank", "nodes", "ranks", "host", "pid")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    group: str
    node_rank: int
    nodes: int
    ranks: int
    host: str
    pid: int
    def __init__(self, group: _Optional[str] = ..., node_rank: _Optional[int] = ..., nodes: _Optional[int] = ..., ranks: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class NodeTaken(_message.Message):
    __slots__ = ("incarnation", "lease_ms", "rendezvous_host", "rendezvous_port")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_HOST_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_PORT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    lease_ms: int
    rendezvous_host: str
    rendezvous_port: int
    def __init__(self, incarnation: _Optional[str] = ..., lease_ms: _Optional[int] = ..., rendezvous_host: _Optional[str] = ..., rendezvous_port: _Optional[int] = ...) -> None: ...

class NodeRefused(_message.Message):
    __slots__ = ("reason", "retry")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retry: bool
    def __init__(self, reason: _Optional[str] = ..., retry: _Optional[bool] = ...) -> None: ...

class RankViews(_message.Message):
    __slots__ = ("ranks", "phase", "step", "waiting_ms", "stopped_ms", "microbatch_us", "idle_ms", "expected_ms", "wait_us", "asks_ms")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_MS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    ASKS_MS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    phase: str
    step: int
    waiting_ms: int
    stopped_ms: int
    microbatch_us: int
    idle_ms: int
    expected_ms: int
    wait_us: int
    asks_ms: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., waiting_ms: _Optional[int] = ..., stopped_ms: _Optional[int] = ..., microbatch_us: _Optional[int] = ..., idle_ms: _Optional[int] = ..., expected_ms: _Optional[int] = ..., wait_us: _Optional[int] = ..., asks_ms: _Optional[int] = ...) -> None: ...

class NodeBeat(_message.Message):
    __slots__ = ("views",)
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    views: _containers.RepeatedCompositeFieldContainer[RankViews]
    def __init__(self, views: _Optional[_Iterable[_Union[RankViews, _Mapping]]] = ...) -> None: ...

class NodeAlive(_message.Message):
    __slots__ = ("lease_ms",)
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    def __init__(self, lease_ms: _Optional[int] = ...) -> None: ...

class RankEnded(_message.Message):
    __slots__ = ("rank", "exit_code", "view")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    rank: int
    exit_code: int
    view: RankViews
    def __init__(self, rank: _Optional[int] = ..., exit_code: _Optional[int] = ..., view: _Optional[_Union[RankViews, _Mapping]] = ...) -> None: ...

class AskedToLeave(_message.Message):
    __slots__ = ("reason", "signal", "deadline_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    signal: bool
    deadline_ms: int
    def __init__(self, reason: _Optional[str] = ..., signal: _Optional[bool] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class GroupEnds(_message.Message):
    __slots__ = ("exit_code", "reason", "first_exit", "asked")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_EXIT_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    reason: str
    first_exit: int
    asked: bool
    def __init__(self, exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., first_exit: _Optional[int] = ..., asked: _Optional[bool] = ...) -> None: ...

class NodeLost(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class NodeFenced(_message.Message):
    __slots__ = ("left",)
    LEFT_FIELD_NUMBER: _ClassVar[int]
    left: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, left: _Optional[_Iterable[int]] = ...) -> None: ...

class SetKeyRequest(_message.Message):
    __slots__ = ("epoch", "key", "value")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    epoch: _lighthouse_pb2.Epoch
    key: str
    value: bytes
    def __init__(self, epoch: _Optional[_Union[_lighthouse_pb2.Epoch, _Mapping]] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class SetKeyReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetKeyRequest(_message.Message):
    __slots__ = ("epoch", "key", "timeout_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: _lighthouse_pb2.Epoch
    key: str
    timeout_ms: int
    def __init__(self, epoch: _Optional[_Union[_lighthouse_pb2.Epoch, _Mapping]] = ..., key: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class GetKeyReply(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class GroupStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupStateReply(_message.Message):
    __slots__ = ("group", "incarnation", "membership", "step", "phase", "in_touch", "away_ms", "lighthouse", "waiting_ms", "suspects", "standby", "over", "promised", "at")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    IN_TOUCH_FIELD_NUMBER: _ClassVar[int]
    AWAY_MS_FIELD_NUMBER: _ClassVar[int]
    LIGHTHOUSE_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    group: str
    incarnation: str
    membership: _lighthouse_pb2.Membership
    step: int
    phase: str
    in_touch: bool
    away_ms: int
    lighthouse: str
    waiting_ms: int
    suspects: _containers.RepeatedScalarFieldContainer[str]
    standby: str
    over: str
    promised: int
    at: str
    def __init__(self, group: _Optional[str] = ..., incarnation: _Optional[str] = ..., membership: _Optional[_Union[_lighthouse_pb2.Membership, _Mapping]] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., in_touch: _Optional[bool] = ..., away_ms: _Optional[int] = ..., lighthouse: _Optional[str] = ..., waiting_ms: _Optional[int] = ..., suspects: _Optional[_Iterable[str]] = ..., standby: _Optional[str] = ..., over: _Optional[str] = ..., promised: _Optional[int] = ..., at: _Optional[str] = ...) -> None: ...
