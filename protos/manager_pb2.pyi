from lightkeeper.protos import lighthouse_pb2 as _lighthouse_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
