import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IssuedCertificate(_message.Message):
    __slots__ = ("chain", "authority", "name", "labels", "not_after", "renew_after")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    RENEW_AFTER_FIELD_NUMBER: _ClassVar[int]
    chain: bytes
    authority: bytes
    name: str
    labels: _containers.ScalarMap[str, str]
    not_after: _timestamp_pb2.Timestamp
    renew_after: _timestamp_pb2.Timestamp
    def __init__(self, chain: _Optional[bytes] = ..., authority: _Optional[bytes] = ..., name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., not_after: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., renew_after: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class EnrollRequest(_message.Message):
    __slots__ = ("token", "csr", "name")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CSR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    token: str
    csr: bytes
    name: str
    def __init__(self, token: _Optional[str] = ..., csr: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class EnrollResponse(_message.Message):
    __slots__ = ("issued",)
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    issued: IssuedCertificate
    def __init__(self, issued: _Optional[_Union[IssuedCertificate, _Mapping]] = ...) -> None: ...

class ReenrollRequest(_message.Message):
    __slots__ = ("certificate", "csr", "signature")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CSR_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    csr: bytes
    signature: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., csr: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ReenrollResponse(_message.Message):
    __slots__ = ("issued",)
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    issued: IssuedCertificate
    def __init__(self, issued: _Optional[_Union[IssuedCertificate, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("csr",)
    CSR_FIELD_NUMBER: _ClassVar[int]
    csr: bytes
    def __init__(self, csr: _Optional[bytes] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("issued",)
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    issued: IssuedCertificate
    def __init__(self, issued: _Optional[_Union[IssuedCertificate, _Mapping]] = ...) -> None: ...
