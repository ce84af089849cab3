from protos.fl.v1 import coordinator_pb2 as _coordinator_pb2
from protos.fl.v1 import tensor_pb2 as _tensor_pb2
from protos.fl.v1 import training_pb2 as _training_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServeRequest(_message.Message):
    __slots__ = ("name", "software")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    software: str
    def __init__(self, name: _Optional[str] = ..., software: _Optional[str] = ...) -> None: ...

class ServeResponse(_message.Message):
    __slots__ = ("coordinator_id", "objects", "epoch")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    objects: str
    epoch: int
    def __init__(self, coordinator_id: _Optional[str] = ..., objects: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("role", "name", "ends", "begins", "serial", "key", "address")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    ends: float
    begins: float
    serial: str
    key: str
    address: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., ends: _Optional[float] = ..., begins: _Optional[float] = ..., serial: _Optional[str] = ..., key: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class ReceiveUpdateRequest(_message.Message):
    __slots__ = ("opening", "written", "buffers", "content", "place", "failure")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    opening: UploadOpening
    written: int
    buffers: bytes
    content: UploadContent
    place: UploadPlace
    failure: UploadFailure
    def __init__(self, opening: _Optional[_Union[UploadOpening, _Mapping]] = ..., written: _Optional[int] = ..., buffers: _Optional[bytes] = ..., content: _Optional[_Union[UploadContent, _Mapping]] = ..., place: _Optional[_Union[UploadPlace, _Mapping]] = ..., failure: _Optional[_Union[UploadFailure, _Mapping]] = ...) -> None: ...

class UploadOpening(_message.Message):
    __slots__ = ("caller", "header")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    header: _training_pb2.UpdateHeader
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., header: _Optional[_Union[_training_pb2.UpdateHeader, _Mapping]] = ...) -> None: ...

class UploadContent(_message.Message):
    __slots__ = ("digest", "squares", "wrong")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    squares: _containers.RepeatedScalarFieldContainer[float]
    wrong: str
    def __init__(self, digest: _Optional[bytes] = ..., squares: _Optional[_Iterable[float]] = ..., wrong: _Optional[str] = ...) -> None: ...

class UploadPlace(_message.Message):
    __slots__ = ("parts", "part_bytes")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[str]
    part_bytes: int
    def __init__(self, parts: _Optional[_Iterable[str]] = ..., part_bytes: _Optional[int] = ...) -> None: ...

class UploadFailure(_message.Message):
    __slots__ = ("is_full", "why")
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    is_full: bool
    why: str
    def __init__(self, is_full: _Optional[bool] = ..., why: _Optional[str] = ...) -> None: ...

class ReceiveUpdateResponse(_message.Message):
    __slots__ = ("plan", "taken", "seal", "receipt")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    plan: UploadPlan
    taken: ReportTaken
    seal: UploadSeal
    receipt: _training_pb2.Receipt
    def __init__(self, plan: _Optional[_Union[UploadPlan, _Mapping]] = ..., taken: _Optional[_Union[ReportTaken, _Mapping]] = ..., seal: _Optional[_Union[UploadSeal, _Mapping]] = ..., receipt: _Optional[_Union[_training_pb2.Receipt, _Mapping]] = ...) -> None: ...

class UploadPlan(_message.Message):
    __slots__ = ("payloads", "keys", "digest_only", "report_bytes", "client_id", "parts")
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ONLY_FIELD_NUMBER: _ClassVar[int]
    REPORT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    payloads: _containers.RepeatedCompositeFieldContainer[PayloadPlan]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    digest_only: bool
    report_bytes: int
    client_id: str
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, payloads: _Optional[_Iterable[_Union[PayloadPlan, _Mapping]]] = ..., keys: _Optional[_Iterable[bytes]] = ..., digest_only: _Optional[bool] = ..., report_bytes: _Optional[int] = ..., client_id: _Optional[str] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class PayloadPlan(_message.Message):
    __slots__ = ("payload", "manifest", "encoding", "fraction")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    payload: str
    manifest: _tensor_pb2.Manifest
    encoding: str
    fraction: float
    def __init__(self, payload: _Optional[str] = ..., manifest: _Optional[_Union[_tensor_pb2.Manifest, _Mapping]] = ..., encoding: _Optional[str] = ..., fraction: _Optional[float] = ...) -> None: ...

class UploadSeal(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendResourceRequest(_message.Message):
    __slots__ = ("opening", "sent", "complete")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    opening: DownloadOpening
    sent: int
    complete: bool
    def __init__(self, opening: _Optional[_Union[DownloadOpening, _Mapping]] = ..., sent: _Optional[int] = ..., complete: _Optional[bool] = ...) -> None: ...

class DownloadOpening(_message.Message):
    __slots__ = ("caller", "request")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    request: _coordinator_pb2.FetchModelRequest
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., request: _Optional[_Union[_coordinator_pb2.FetchModelRequest, _Mapping]] = ...) -> None: ...

class SendResourceResponse(_message.Message):
    __slots__ = ("plan", "taken")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    plan: DownloadPlan
    taken: ReportTaken
    def __init__(self, plan: _Optional[_Union[DownloadPlan, _Mapping]] = ..., taken: _Optional[_Union[ReportTaken, _Mapping]] = ...) -> None: ...

class DownloadPlan(_message.Message):
    __slots__ = ("size_bytes", "report_bytes")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORT_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    report_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ..., report_bytes: _Optional[int] = ...) -> None: ...

class QueryForClientRequest(_message.Message):
    __slots__ = ("caller", "request")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    request: _coordinator_pb2.QueryUploadRequest
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., request: _Optional[_Union[_coordinator_pb2.QueryUploadRequest, _Mapping]] = ...) -> None: ...

class QueryForClientResponse(_message.Message):
    __slots__ = ("receipt", "client_id", "kept_bytes")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    receipt: _training_pb2.Receipt
    client_id: str
    kept_bytes: int
    def __init__(self, receipt: _Optional[_Union[_training_pb2.Receipt, _Mapping]] = ..., client_id: _Optional[str] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class FetchResourceRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: _tensor_pb2.Digest
    def __init__(self, digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ...) -> None: ...

class FetchResourceResponse(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    def __init__(self, message: _Optional[bytes] = ...) -> None: ...
