import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.fl.v1 import coordinator_pb2 as _coordinator_pb2
from protos.fl.v1 import training_pb2 as _training_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InvalidField(_message.Message):
    __slots__ = ("field", "expected", "came")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    field: str
    expected: str
    came: str
    def __init__(self, field: _Optional[str] = ..., expected: _Optional[str] = ..., came: _Optional[str] = ...) -> None: ...

class UnknownSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionFenced(_message.Message):
    __slots__ = ("by_other_instance",)
    BY_OTHER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    by_other_instance: bool
    def __init__(self, by_other_instance: _Optional[bool] = ...) -> None: ...

class ProtocolMismatch(_message.Message):
    __slots__ = ("client", "server", "time", "version", "min_client_version")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    client: _coordinator_pb2.ProtocolRange
    server: _coordinator_pb2.ProtocolRange
    time: _timestamp_pb2.Timestamp
    version: str
    min_client_version: str
    def __init__(self, client: _Optional[_Union[_coordinator_pb2.ProtocolRange, _Mapping]] = ..., server: _Optional[_Union[_coordinator_pb2.ProtocolRange, _Mapping]] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., version: _Optional[str] = ..., min_client_version: _Optional[str] = ...) -> None: ...

class NotAllowed(_message.Message):
    __slots__ = ("identity", "needed", "roles", "revoked")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    identity: str
    needed: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    revoked: bool
    def __init__(self, identity: _Optional[str] = ..., needed: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., revoked: _Optional[bool] = ...) -> None: ...

class UnknownResource(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnknownRun(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class UnknownClient(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class WrongRunState(_message.Message):
    __slots__ = ("run_id", "state", "allowed_states")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_STATES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    allowed_states: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ..., allowed_states: _Optional[_Iterable[str]] = ...) -> None: ...

class BrokenUpload(_message.Message):
    __slots__ = ("key", "kept_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: _training_pb2.ExchangeKey
    kept_bytes: int
    def __init__(self, key: _Optional[_Union[_training_pb2.ExchangeKey, _Mapping]] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class RetryLater(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: _duration_pb2.Duration
    def __init__(self, wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
