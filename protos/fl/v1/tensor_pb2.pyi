from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT16: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_PLAIN: _ClassVar[Encoding]
    ENCODING_BF16: _ClassVar[Encoding]
    ENCODING_INT8: _ClassVar[Encoding]
    ENCODING_INT4: _ClassVar[Encoding]
    ENCODING_INT2: _ClassVar[Encoding]
    ENCODING_EDEN4: _ClassVar[Encoding]
    ENCODING_EDEN2: _ClassVar[Encoding]
    ENCODING_EDEN1: _ClassVar[Encoding]
    ENCODING_TOP_K: _ClassVar[Encoding]
    ENCODING_RANDOM_K: _ClassVar[Encoding]

class DigestAlgorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIGEST_ALGORITHM_UNSPECIFIED: _ClassVar[DigestAlgorithm]
    DIGEST_ALGORITHM_BLAKE3_256: _ClassVar[DigestAlgorithm]

class ResourceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESOURCE_KIND_UNSPECIFIED: _ClassVar[ResourceKind]
    RESOURCE_KIND_MODEL: _ClassVar[ResourceKind]
    RESOURCE_KIND_DIRECTION: _ClassVar[ResourceKind]
    RESOURCE_KIND_FROZEN: _ClassVar[ResourceKind]
    RESOURCE_KIND_OPTIMIZER: _ClassVar[ResourceKind]
    RESOURCE_KIND_AVERAGED: _ClassVar[ResourceKind]
    RESOURCE_KIND_RELEASE: _ClassVar[ResourceKind]
    RESOURCE_KIND_PACKAGE: _ClassVar[ResourceKind]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_INT64: DType
DTYPE_INT32: DType
DTYPE_INT16: DType
DTYPE_INT8: DType
DTYPE_UINT8: DType
DTYPE_BOOL: DType
ENCODING_UNSPECIFIED: Encoding
ENCODING_PLAIN: Encoding
ENCODING_BF16: Encoding
ENCODING_INT8: Encoding
ENCODING_INT4: Encoding
ENCODING_INT2: Encoding
ENCODING_EDEN4: Encoding
ENCODING_EDEN2: Encoding
ENCODING_EDEN1: Encoding
ENCODING_TOP_K: Encoding
ENCODING_RANDOM_K: Encoding
DIGEST_ALGORITHM_UNSPECIFIED: DigestAlgorithm
DIGEST_ALGORITHM_BLAKE3_256: DigestAlgorithm
RESOURCE_KIND_UNSPECIFIED: ResourceKind
RESOURCE_KIND_MODEL: ResourceKind
RESOURCE_KIND_DIRECTION: ResourceKind
RESOURCE_KIND_FROZEN: ResourceKind
RESOURCE_KIND_OPTIMIZER: ResourceKind
RESOURCE_KIND_AVERAGED: ResourceKind
RESOURCE_KIND_RELEASE: ResourceKind
RESOURCE_KIND_PACKAGE: ResourceKind

class Digest(_message.Message):
    __slots__ = ("algorithm", "value")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    algorithm: DigestAlgorithm
    value: bytes
    def __init__(self, algorithm: _Optional[_Union[DigestAlgorithm, str]] = ..., value: _Optional[bytes] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "trainable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    trainable: bool
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., trainable: _Optional[bool] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("tensors", "size_bytes", "encoding")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    size_bytes: int
    encoding: Encoding
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., size_bytes: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ...) -> None: ...

class Resource(_message.Message):
    __slots__ = ("kind", "digest", "size_bytes", "encoding", "name", "encoding_key", "difference", "is_base")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENCODING_KEY_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    IS_BASE_FIELD_NUMBER: _ClassVar[int]
    kind: ResourceKind
    digest: Digest
    size_bytes: int
    encoding: Encoding
    name: str
    encoding_key: bytes
    difference: Difference
    is_base: bool
    def __init__(self, kind: _Optional[_Union[ResourceKind, str]] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ..., size_bytes: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., name: _Optional[str] = ..., encoding_key: _Optional[bytes] = ..., difference: _Optional[_Union[Difference, _Mapping]] = ..., is_base: _Optional[bool] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("base", "digest", "size_bytes", "word_bytes")
    BASE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    base: Digest
    digest: Digest
    size_bytes: int
    word_bytes: int
    def __init__(self, base: _Optional[_Union[Digest, _Mapping]] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ..., size_bytes: _Optional[int] = ..., word_bytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data", "crc32c")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...
