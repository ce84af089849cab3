import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from protos.fl.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SecureStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SECURE_STAGE_UNSPECIFIED: _ClassVar[SecureStage]
    SECURE_STAGE_KEYS: _ClassVar[SecureStage]
    SECURE_STAGE_COINS: _ClassVar[SecureStage]
    SECURE_STAGE_SHARES: _ClassVar[SecureStage]
    SECURE_STAGE_MASKED: _ClassVar[SecureStage]
    SECURE_STAGE_SURVIVORS: _ClassVar[SecureStage]
    SECURE_STAGE_OPENING: _ClassVar[SecureStage]

class PayloadKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAYLOAD_KIND_UNSPECIFIED: _ClassVar[PayloadKind]
    PAYLOAD_KIND_DELTA: _ClassVar[PayloadKind]
    PAYLOAD_KIND_FULL_GRADIENT: _ClassVar[PayloadKind]
    PAYLOAD_KIND_VARIATE_CHANGE: _ClassVar[PayloadKind]
    PAYLOAD_KIND_CLIENT_MOMENTUM: _ClassVar[PayloadKind]
    PAYLOAD_KIND_NAMED: _ClassVar[PayloadKind]
    PAYLOAD_KIND_MASKED: _ClassVar[PayloadKind]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_LATE: _ClassVar[RefusalReason]
    REFUSAL_REASON_NOT_ASSIGNED: _ClassVar[RefusalReason]
    REFUSAL_REASON_LAYOUT: _ClassVar[RefusalReason]
    REFUSAL_REASON_SIZE: _ClassVar[RefusalReason]
    REFUSAL_REASON_DIGEST: _ClassVar[RefusalReason]
    REFUSAL_REASON_NOT_FINITE: _ClassVar[RefusalReason]
    REFUSAL_REASON_NORM: _ClassVar[RefusalReason]
    REFUSAL_REASON_STATE_EPOCH: _ClassVar[RefusalReason]
    REFUSAL_REASON_BANNED: _ClassVar[RefusalReason]
    REFUSAL_REASON_NOT_NEEDED: _ClassVar[RefusalReason]
    REFUSAL_REASON_ABANDONED: _ClassVar[RefusalReason]
    REFUSAL_REASON_HEADER: _ClassVar[RefusalReason]
    REFUSAL_REASON_LEFT_OUT: _ClassVar[RefusalReason]
    REFUSAL_REASON_RELATIVE_NORM: _ClassVar[RefusalReason]
    REFUSAL_REASON_STALE: _ClassVar[RefusalReason]
SECURE_STAGE_UNSPECIFIED: SecureStage
SECURE_STAGE_KEYS: SecureStage
SECURE_STAGE_COINS: SecureStage
SECURE_STAGE_SHARES: SecureStage
SECURE_STAGE_MASKED: SecureStage
SECURE_STAGE_SURVIVORS: SecureStage
SECURE_STAGE_OPENING: SecureStage
PAYLOAD_KIND_UNSPECIFIED: PayloadKind
PAYLOAD_KIND_DELTA: PayloadKind
PAYLOAD_KIND_FULL_GRADIENT: PayloadKind
PAYLOAD_KIND_VARIATE_CHANGE: PayloadKind
PAYLOAD_KIND_CLIENT_MOMENTUM: PayloadKind
PAYLOAD_KIND_NAMED: PayloadKind
PAYLOAD_KIND_MASKED: PayloadKind
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_LATE: RefusalReason
REFUSAL_REASON_NOT_ASSIGNED: RefusalReason
REFUSAL_REASON_LAYOUT: RefusalReason
REFUSAL_REASON_SIZE: RefusalReason
REFUSAL_REASON_DIGEST: RefusalReason
REFUSAL_REASON_NOT_FINITE: RefusalReason
REFUSAL_REASON_NORM: RefusalReason
REFUSAL_REASON_STATE_EPOCH: RefusalReason
REFUSAL_REASON_BANNED: RefusalReason
REFUSAL_REASON_NOT_NEEDED: RefusalReason
REFUSAL_REASON_ABANDONED: RefusalReason
REFUSAL_REASON_HEADER: RefusalReason
REFUSAL_REASON_LEFT_OUT: RefusalReason
REFUSAL_REASON_RELATIVE_NORM: RefusalReason
REFUSAL_REASON_STALE: RefusalReason

class ExchangeKey(_message.Message):
    __slots__ = ("run_id", "round", "exchange")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    exchange: int
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., exchange: _Optional[int] = ...) -> None: ...

class TaskFingerprint(_message.Message):
    __slots__ = ("version", "source")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    version: str
    source: str
    def __init__(self, version: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class AlgorithmSpec(_message.Message):
    __slots__ = ("name", "parameters", "schedules", "fingerprint")
    class SchedulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ParameterSchedule
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ParameterSchedule, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _struct_pb2.Struct
    schedules: _containers.MessageMap[str, ParameterSchedule]
    fingerprint: TaskFingerprint
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., schedules: _Optional[_Mapping[str, ParameterSchedule]] = ..., fingerprint: _Optional[_Union[TaskFingerprint, _Mapping]] = ...) -> None: ...

class ParameterSchedule(_message.Message):
    __slots__ = ("kind", "end", "milestones", "factor")
    KIND_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MILESTONES_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    kind: str
    end: float
    milestones: _containers.RepeatedScalarFieldContainer[int]
    factor: float
    def __init__(self, kind: _Optional[str] = ..., end: _Optional[float] = ..., milestones: _Optional[_Iterable[int]] = ..., factor: _Optional[float] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "parameters", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _struct_pb2.Struct
    state: str
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., state: _Optional[str] = ...) -> None: ...

class RateSchedule(_message.Message):
    __slots__ = ("kind", "warmup", "end", "over")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    warmup: float
    end: float
    over: str
    def __init__(self, kind: _Optional[str] = ..., warmup: _Optional[float] = ..., end: _Optional[float] = ..., over: _Optional[str] = ...) -> None: ...

class LocalTraining(_message.Message):
    __slots__ = ("algorithm", "learning_rate", "local_epochs", "local_steps", "batch_size", "weight_decay", "max_gradient_norm", "seed", "population", "population_examples", "optimizer", "schedule", "micro_batch_size", "privacy", "continue_data", "schedule_start", "schedule_steps")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MAX_GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    POPULATION_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_DATA_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_START_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_STEPS_FIELD_NUMBER: _ClassVar[int]
    algorithm: AlgorithmSpec
    learning_rate: float
    local_epochs: int
    local_steps: int
    batch_size: int
    weight_decay: float
    max_gradient_norm: float
    seed: int
    population: int
    population_examples: int
    optimizer: OptimizerSpec
    schedule: RateSchedule
    micro_batch_size: int
    privacy: LocalPrivacy
    continue_data: bool
    schedule_start: int
    schedule_steps: int
    def __init__(self, algorithm: _Optional[_Union[AlgorithmSpec, _Mapping]] = ..., learning_rate: _Optional[float] = ..., local_epochs: _Optional[int] = ..., local_steps: _Optional[int] = ..., batch_size: _Optional[int] = ..., weight_decay: _Optional[float] = ..., max_gradient_norm: _Optional[float] = ..., seed: _Optional[int] = ..., population: _Optional[int] = ..., population_examples: _Optional[int] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., schedule: _Optional[_Union[RateSchedule, _Mapping]] = ..., micro_batch_size: _Optional[int] = ..., privacy: _Optional[_Union[LocalPrivacy, _Mapping]] = ..., continue_data: _Optional[bool] = ..., schedule_start: _Optional[int] = ..., schedule_steps: _Optional[int] = ...) -> None: ...

class LocalPrivacy(_message.Message):
    __slots__ = ("unit", "noise_multiplier", "clip", "delta")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    unit: str
    noise_multiplier: float
    clip: float
    delta: float
    def __init__(self, unit: _Optional[str] = ..., noise_multiplier: _Optional[float] = ..., clip: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class StageMessage(_message.Message):
    __slots__ = ("key", "draw", "stage", "content")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DRAW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    key: ExchangeKey
    draw: int
    stage: SecureStage
    content: bytes
    def __init__(self, key: _Optional[_Union[ExchangeKey, _Mapping]] = ..., draw: _Optional[int] = ..., stage: _Optional[_Union[SecureStage, str]] = ..., content: _Optional[bytes] = ...) -> None: ...

class SecureAggregation(_message.Message):
    __slots__ = ("protocol", "terms")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    protocol: str
    terms: bytes
    def __init__(self, protocol: _Optional[str] = ..., terms: _Optional[bytes] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("key", "attempt", "task", "fingerprint", "resources", "training", "payloads", "deadline", "state_epoch", "upload_encodings", "max_update_bytes", "counted", "traceparent", "payload_names", "personal", "local_frozen", "upload_fraction", "min_accepted", "without_direction", "clip", "secure_aggregation", "rounding", "data")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    STATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_UPDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_NAMES_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FROZEN_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FRACTION_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    SECURE_AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    key: ExchangeKey
    attempt: int
    task: str
    fingerprint: TaskFingerprint
    resources: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Resource]
    training: LocalTraining
    payloads: _containers.RepeatedScalarFieldContainer[PayloadKind]
    deadline: _duration_pb2.Duration
    state_epoch: int
    upload_encodings: _containers.RepeatedScalarFieldContainer[_tensor_pb2.Encoding]
    max_update_bytes: int
    counted: Outcome
    traceparent: str
    payload_names: _containers.RepeatedScalarFieldContainer[str]
    personal: _containers.RepeatedScalarFieldContainer[str]
    local_frozen: _tensor_pb2.Resource
    upload_fraction: float
    min_accepted: int
    without_direction: bool
    clip: float
    secure_aggregation: SecureAggregation
    rounding: str
    data: str
    def __init__(self, key: _Optional[_Union[ExchangeKey, _Mapping]] = ..., attempt: _Optional[int] = ..., task: _Optional[str] = ..., fingerprint: _Optional[_Union[TaskFingerprint, _Mapping]] = ..., resources: _Optional[_Iterable[_Union[_tensor_pb2.Resource, _Mapping]]] = ..., training: _Optional[_Union[LocalTraining, _Mapping]] = ..., payloads: _Optional[_Iterable[_Union[PayloadKind, str]]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state_epoch: _Optional[int] = ..., upload_encodings: _Optional[_Iterable[_Union[_tensor_pb2.Encoding, str]]] = ..., max_update_bytes: _Optional[int] = ..., counted: _Optional[_Union[Outcome, _Mapping]] = ..., traceparent: _Optional[str] = ..., payload_names: _Optional[_Iterable[str]] = ..., personal: _Optional[_Iterable[str]] = ..., local_frozen: _Optional[_Union[_tensor_pb2.Resource, _Mapping]] = ..., upload_fraction: _Optional[float] = ..., min_accepted: _Optional[int] = ..., without_direction: _Optional[bool] = ..., clip: _Optional[float] = ..., secure_aggregation: _Optional[_Union[SecureAggregation, _Mapping]] = ..., rounding: _Optional[str] = ..., data: _Optional[str] = ...) -> None: ...

class EvaluationAssignment(_message.Message):
    __slots__ = ("key", "task", "fingerprint", "resources", "deadline", "personal", "local_frozen", "data")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FROZEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    key: ExchangeKey
    task: str
    fingerprint: TaskFingerprint
    resources: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Resource]
    deadline: _duration_pb2.Duration
    personal: _containers.RepeatedScalarFieldContainer[str]
    local_frozen: _tensor_pb2.Resource
    data: str
    def __init__(self, key: _Optional[_Union[ExchangeKey, _Mapping]] = ..., task: _Optional[str] = ..., fingerprint: _Optional[_Union[TaskFingerprint, _Mapping]] = ..., resources: _Optional[_Iterable[_Union[_tensor_pb2.Resource, _Mapping]]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., personal: _Optional[_Iterable[str]] = ..., local_frozen: _Optional[_Union[_tensor_pb2.Resource, _Mapping]] = ..., data: _Optional[str] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("kind", "manifest", "name")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    kind: PayloadKind
    manifest: _tensor_pb2.Manifest
    name: str
    def __init__(self, kind: _Optional[_Union[PayloadKind, str]] = ..., manifest: _Optional[_Union[_tensor_pb2.Manifest, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class EpochMetrics(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AppliedPrivacy(_message.Message):
    __slots__ = ("applied", "epsilon")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    applied: LocalPrivacy
    epsilon: float
    def __init__(self, applied: _Optional[_Union[LocalPrivacy, _Mapping]] = ..., epsilon: _Optional[float] = ...) -> None: ...

class UpdateHeader(_message.Message):
    __slots__ = ("session_id", "key", "attempt", "payloads", "size_bytes", "digest", "num_examples", "num_steps", "training_loss", "training_seconds", "resume_offset", "state_epoch", "epochs", "privacy")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_LOSS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    key: ExchangeKey
    attempt: int
    payloads: _containers.RepeatedCompositeFieldContainer[Payload]
    size_bytes: int
    digest: _tensor_pb2.Digest
    num_examples: int
    num_steps: int
    training_loss: float
    training_seconds: float
    resume_offset: int
    state_epoch: int
    epochs: _containers.RepeatedCompositeFieldContainer[EpochMetrics]
    privacy: AppliedPrivacy
    def __init__(self, session_id: _Optional[str] = ..., key: _Optional[_Union[ExchangeKey, _Mapping]] = ..., attempt: _Optional[int] = ..., payloads: _Optional[_Iterable[_Union[Payload, _Mapping]]] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ..., num_examples: _Optional[int] = ..., num_steps: _Optional[int] = ..., training_loss: _Optional[float] = ..., training_seconds: _Optional[float] = ..., resume_offset: _Optional[int] = ..., state_epoch: _Optional[int] = ..., epochs: _Optional[_Iterable[_Union[EpochMetrics, _Mapping]]] = ..., privacy: _Optional[_Union[AppliedPrivacy, _Mapping]] = ...) -> None: ...

class UpdateTrailer(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("key", "digest", "admitted", "reason", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: ExchangeKey
    digest: _tensor_pb2.Digest
    admitted: bool
    reason: RefusalReason
    detail: str
    def __init__(self, key: _Optional[_Union[ExchangeKey, _Mapping]] = ..., digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ..., admitted: _Optional[bool] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("key", "digest", "counted", "clip_factor", "reason", "state_epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    CLIP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: ExchangeKey
    digest: _tensor_pb2.Digest
    counted: bool
    clip_factor: float
    reason: RefusalReason
    state_epoch: int
    def __init__(self, key: _Optional[_Union[ExchangeKey, _Mapping]] = ..., digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ..., counted: _Optional[bool] = ..., clip_factor: _Optional[float] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., state_epoch: _Optional[int] = ...) -> None: ...
