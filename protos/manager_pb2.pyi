from lightkeeper.protos import lighthouse_pb2 as _lighthouse_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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
