import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.fl.v1 import tensor_pb2 as _tensor_pb2
from protos.fl.v1 import training_pb2 as _training_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnavailableReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNAVAILABLE_REASON_UNSPECIFIED: _ClassVar[UnavailableReason]
    UNAVAILABLE_REASON_TIME_WINDOW: _ClassVar[UnavailableReason]
    UNAVAILABLE_REASON_DEVICE_BUSY: _ClassVar[UnavailableReason]
    UNAVAILABLE_REASON_POWER: _ClassVar[UnavailableReason]
    UNAVAILABLE_REASON_TEMPERATURE: _ClassVar[UnavailableReason]
    UNAVAILABLE_REASON_RESOURCES: _ClassVar[UnavailableReason]
    UNAVAILABLE_REASON_STOPPING: _ClassVar[UnavailableReason]
    UNAVAILABLE_REASON_OWNER: _ClassVar[UnavailableReason]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_TASK_ERROR: _ClassVar[FailureReason]
    FAILURE_REASON_FINGERPRINT: _ClassVar[FailureReason]
    FAILURE_REASON_LAYOUT: _ClassVar[FailureReason]
    FAILURE_REASON_NOT_FINITE: _ClassVar[FailureReason]
    FAILURE_REASON_RESOURCES: _ClassVar[FailureReason]
    FAILURE_REASON_STOPPED: _ClassVar[FailureReason]
    FAILURE_REASON_UNSUPPORTED: _ClassVar[FailureReason]
    FAILURE_REASON_STATE_LOST: _ClassVar[FailureReason]
    FAILURE_REASON_REFUSED: _ClassVar[FailureReason]
    FAILURE_REASON_POLICY: _ClassVar[FailureReason]
    FAILURE_REASON_SECURE_AGGREGATION: _ClassVar[FailureReason]

class ReleaseOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_OUTCOME_UNSPECIFIED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_INSTALLED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_EVALUATED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_NOT_EVALUATED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_REFUSED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_FAILED: _ClassVar[ReleaseOutcome]
UNAVAILABLE_REASON_UNSPECIFIED: UnavailableReason
UNAVAILABLE_REASON_TIME_WINDOW: UnavailableReason
UNAVAILABLE_REASON_DEVICE_BUSY: UnavailableReason
UNAVAILABLE_REASON_POWER: UnavailableReason
UNAVAILABLE_REASON_TEMPERATURE: UnavailableReason
UNAVAILABLE_REASON_RESOURCES: UnavailableReason
UNAVAILABLE_REASON_STOPPING: UnavailableReason
UNAVAILABLE_REASON_OWNER: UnavailableReason
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_TASK_ERROR: FailureReason
FAILURE_REASON_FINGERPRINT: FailureReason
FAILURE_REASON_LAYOUT: FailureReason
FAILURE_REASON_NOT_FINITE: FailureReason
FAILURE_REASON_RESOURCES: FailureReason
FAILURE_REASON_STOPPED: FailureReason
FAILURE_REASON_UNSUPPORTED: FailureReason
FAILURE_REASON_STATE_LOST: FailureReason
FAILURE_REASON_REFUSED: FailureReason
FAILURE_REASON_POLICY: FailureReason
FAILURE_REASON_SECURE_AGGREGATION: FailureReason
RELEASE_OUTCOME_UNSPECIFIED: ReleaseOutcome
RELEASE_OUTCOME_INSTALLED: ReleaseOutcome
RELEASE_OUTCOME_EVALUATED: ReleaseOutcome
RELEASE_OUTCOME_NOT_EVALUATED: ReleaseOutcome
RELEASE_OUTCOME_REFUSED: ReleaseOutcome
RELEASE_OUTCOME_FAILED: ReleaseOutcome

class ProtocolRange(_message.Message):
    __slots__ = ("min", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: int
    max: int
    def __init__(self, min: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("kind", "name", "memory_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    memory_bytes: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class TaskOffer(_message.Message):
    __slots__ = ("name", "fingerprint", "train_examples", "eval_examples", "train_batches", "frozen", "data", "labels", "package")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRAIN_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVAL_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    TRAIN_BATCHES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: _training_pb2.TaskFingerprint
    train_examples: int
    eval_examples: int
    train_batches: int
    frozen: _tensor_pb2.Resource
    data: str
    labels: _containers.ScalarMap[str, str]
    package: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[_Union[_training_pb2.TaskFingerprint, _Mapping]] = ..., train_examples: _Optional[int] = ..., eval_examples: _Optional[int] = ..., train_batches: _Optional[int] = ..., frozen: _Optional[_Union[_tensor_pb2.Resource, _Mapping]] = ..., data: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., package: _Optional[str] = ...) -> None: ...

class MethodOffer(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: _training_pb2.TaskFingerprint
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[_Union[_training_pb2.TaskFingerprint, _Mapping]] = ...) -> None: ...

class HeldState(_message.Message):
    __slots__ = ("run_id", "state_epoch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state_epoch: int
    def __init__(self, run_id: _Optional[str] = ..., state_epoch: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("client_id", "instance_id", "protocol", "software", "labels", "device", "tasks", "pending", "states", "encodings", "availability", "methods", "held", "privacy_resets", "releases", "packages", "package_refusals")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_RESETS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    instance_id: str
    protocol: ProtocolRange
    software: str
    labels: _containers.ScalarMap[str, str]
    device: Device
    tasks: _containers.RepeatedCompositeFieldContainer[TaskOffer]
    pending: _containers.RepeatedCompositeFieldContainer[_training_pb2.ExchangeKey]
    states: _containers.RepeatedCompositeFieldContainer[HeldState]
    encodings: _containers.RepeatedScalarFieldContainer[_tensor_pb2.Encoding]
    availability: Availability
    methods: _containers.RepeatedCompositeFieldContainer[MethodOffer]
    held: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Digest]
    privacy_resets: int
    releases: HeldReleases
    packages: _containers.RepeatedScalarFieldContainer[str]
    package_refusals: _containers.RepeatedCompositeFieldContainer[PackageRefusal]
    def __init__(self, client_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., protocol: _Optional[_Union[ProtocolRange, _Mapping]] = ..., software: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., tasks: _Optional[_Iterable[_Union[TaskOffer, _Mapping]]] = ..., pending: _Optional[_Iterable[_Union[_training_pb2.ExchangeKey, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[HeldState, _Mapping]]] = ..., encodings: _Optional[_Iterable[_Union[_tensor_pb2.Encoding, str]]] = ..., availability: _Optional[_Union[Availability, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[MethodOffer, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[_tensor_pb2.Digest, _Mapping]]] = ..., privacy_resets: _Optional[int] = ..., releases: _Optional[_Union[HeldReleases, _Mapping]] = ..., packages: _Optional[_Iterable[str]] = ..., package_refusals: _Optional[_Iterable[_Union[PackageRefusal, _Mapping]]] = ...) -> None: ...

class PackageRefusal(_message.Message):
    __slots__ = ("name", "digest", "rule", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rule: str
    detail: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rule: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class HeldReleases(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[HeldRelease]
    def __init__(self, held: _Optional[_Iterable[_Union[HeldRelease, _Mapping]]] = ...) -> None: ...

class HeldRelease(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_chunk_bytes", "chunk_bytes", "keepalive", "reattach_grace")
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_FIELD_NUMBER: _ClassVar[int]
    REATTACH_GRACE_FIELD_NUMBER: _ClassVar[int]
    max_chunk_bytes: int
    chunk_bytes: int
    keepalive: _duration_pb2.Duration
    reattach_grace: _duration_pb2.Duration
    def __init__(self, max_chunk_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., keepalive: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reattach_grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("session_id", "protocol", "coordinator_id", "limits", "outcomes", "ended_runs", "data_address", "time")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ENDED_RUNS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    protocol: int
    coordinator_id: str
    limits: Limits
    outcomes: _containers.RepeatedCompositeFieldContainer[_training_pb2.Outcome]
    ended_runs: _containers.RepeatedScalarFieldContainer[str]
    data_address: str
    time: _timestamp_pb2.Timestamp
    def __init__(self, session_id: _Optional[str] = ..., protocol: _Optional[int] = ..., coordinator_id: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., outcomes: _Optional[_Iterable[_Union[_training_pb2.Outcome, _Mapping]]] = ..., ended_runs: _Optional[_Iterable[str]] = ..., data_address: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("session_id", "authorities", "pending", "states")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    authorities: _containers.RepeatedScalarFieldContainer[bytes]
    pending: _containers.RepeatedCompositeFieldContainer[_training_pb2.ExchangeKey]
    states: _containers.RepeatedCompositeFieldContainer[HeldState]
    def __init__(self, session_id: _Optional[str] = ..., authorities: _Optional[_Iterable[bytes]] = ..., pending: _Optional[_Iterable[_Union[_training_pb2.ExchangeKey, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[HeldState, _Mapping]]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetryWindow(_message.Message):
    __slots__ = ("wait", "reason")
    WAIT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    wait: _duration_pb2.Duration
    reason: str
    def __init__(self, wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _training_pb2.ExchangeKey
    reason: _training_pb2.RefusalReason
    def __init__(self, key: _Optional[_Union[_training_pb2.ExchangeKey, _Mapping]] = ..., reason: _Optional[_Union[_training_pb2.RefusalReason, str]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("coordinator_leaving", "reason")
    COORDINATOR_LEAVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    coordinator_leaving: bool
    reason: str
    def __init__(self, coordinator_leaving: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class RunEnded(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class PackageOffer(_message.Message):
    __slots__ = ("name", "digest", "resource")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    resource: _tensor_pb2.Resource
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., resource: _Optional[_Union[_tensor_pb2.Resource, _Mapping]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("attached", "assignment", "evaluation", "outcome", "retry", "cancel", "drain", "notice", "run_ended", "stage", "release", "package")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    assignment: _training_pb2.Assignment
    evaluation: _training_pb2.EvaluationAssignment
    outcome: _training_pb2.Outcome
    retry: RetryWindow
    cancel: Cancel
    drain: Drain
    notice: Notice
    run_ended: RunEnded
    stage: _training_pb2.StageMessage
    release: ReleaseOrder
    package: PackageOffer
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., assignment: _Optional[_Union[_training_pb2.Assignment, _Mapping]] = ..., evaluation: _Optional[_Union[_training_pb2.EvaluationAssignment, _Mapping]] = ..., outcome: _Optional[_Union[_training_pb2.Outcome, _Mapping]] = ..., retry: _Optional[_Union[RetryWindow, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., run_ended: _Optional[_Union[RunEnded, _Mapping]] = ..., stage: _Optional[_Union[_training_pb2.StageMessage, _Mapping]] = ..., release: _Optional[_Union[ReleaseOrder, _Mapping]] = ..., package: _Optional[_Union[PackageOffer, _Mapping]] = ...) -> None: ...

class ReleaseOrder(_message.Message):
    __slots__ = ("model", "version", "description", "signature")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    description: bytes
    signature: bytes
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., description: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class FetchModelRequest(_message.Message):
    __slots__ = ("session_id", "digest", "offset", "run_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    digest: _tensor_pb2.Digest
    offset: int
    run_id: str
    def __init__(self, session_id: _Optional[str] = ..., digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ..., offset: _Optional[int] = ..., run_id: _Optional[str] = ...) -> None: ...

class ResourceHeader(_message.Message):
    __slots__ = ("resource", "manifest")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    resource: _tensor_pb2.Resource
    manifest: _tensor_pb2.Manifest
    def __init__(self, resource: _Optional[_Union[_tensor_pb2.Resource, _Mapping]] = ..., manifest: _Optional[_Union[_tensor_pb2.Manifest, _Mapping]] = ...) -> None: ...

class FetchModelResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ResourceHeader
    chunk: _tensor_pb2.Chunk
    def __init__(self, header: _Optional[_Union[ResourceHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.Chunk, _Mapping]] = ...) -> None: ...

class SubmitUpdateRequest(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: _training_pb2.UpdateHeader
    chunk: _tensor_pb2.Chunk
    trailer: _training_pb2.UpdateTrailer
    def __init__(self, header: _Optional[_Union[_training_pb2.UpdateHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.Chunk, _Mapping]] = ..., trailer: _Optional[_Union[_training_pb2.UpdateTrailer, _Mapping]] = ...) -> None: ...

class SubmitUpdateResponse(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: _training_pb2.Receipt
    def __init__(self, receipt: _Optional[_Union[_training_pb2.Receipt, _Mapping]] = ...) -> None: ...

class QueryUploadRequest(_message.Message):
    __slots__ = ("session_id", "key", "digest")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    key: _training_pb2.ExchangeKey
    digest: _tensor_pb2.Digest
    def __init__(self, session_id: _Optional[str] = ..., key: _Optional[_Union[_training_pb2.ExchangeKey, _Mapping]] = ..., digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ...) -> None: ...

class QueryUploadResponse(_message.Message):
    __slots__ = ("kept_bytes", "receipt")
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    kept_bytes: int
    receipt: _training_pb2.Receipt
    def __init__(self, kept_bytes: _Optional[int] = ..., receipt: _Optional[_Union[_training_pb2.Receipt, _Mapping]] = ...) -> None: ...

class Availability(_message.Message):
    __slots__ = ("may_train", "reason", "detail", "until")
    MAY_TRAIN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    may_train: bool
    reason: UnavailableReason
    detail: str
    until: _timestamp_pb2.Timestamp
    def __init__(self, may_train: _Optional[bool] = ..., reason: _Optional[_Union[UnavailableReason, str]] = ..., detail: _Optional[str] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class WorkFailure(_message.Message):
    __slots__ = ("key", "reason", "message", "error_type", "place")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    key: _training_pb2.ExchangeKey
    reason: FailureReason
    message: str
    error_type: str
    place: str
    def __init__(self, key: _Optional[_Union[_training_pb2.ExchangeKey, _Mapping]] = ..., reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ..., error_type: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class ReportStatusRequest(_message.Message):
    __slots__ = ("session_id", "availability", "failures")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    availability: Availability
    failures: _containers.RepeatedCompositeFieldContainer[WorkFailure]
    def __init__(self, session_id: _Optional[str] = ..., availability: _Optional[_Union[Availability, _Mapping]] = ..., failures: _Optional[_Iterable[_Union[WorkFailure, _Mapping]]] = ...) -> None: ...

class ReportStatusResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnswerStageRequest(_message.Message):
    __slots__ = ("session_id", "answer")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    answer: _training_pb2.StageMessage
    def __init__(self, session_id: _Optional[str] = ..., answer: _Optional[_Union[_training_pb2.StageMessage, _Mapping]] = ...) -> None: ...

class AnswerStageResponse(_message.Message):
    __slots__ = ("wanted",)
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: bool
    def __init__(self, wanted: _Optional[bool] = ...) -> None: ...

class ReportEvaluationRequest(_message.Message):
    __slots__ = ("session_id", "key", "num_examples", "metrics", "without_personal", "sums", "sums_without_personal")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class WithoutPersonalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_PERSONAL_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    SUMS_WITHOUT_PERSONAL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    key: _training_pb2.ExchangeKey
    num_examples: int
    metrics: _containers.ScalarMap[str, float]
    without_personal: _containers.ScalarMap[str, float]
    sums: _containers.RepeatedCompositeFieldContainer[MetricSum]
    sums_without_personal: _containers.RepeatedCompositeFieldContainer[MetricSum]
    def __init__(self, session_id: _Optional[str] = ..., key: _Optional[_Union[_training_pb2.ExchangeKey, _Mapping]] = ..., num_examples: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., without_personal: _Optional[_Mapping[str, float]] = ..., sums: _Optional[_Iterable[_Union[MetricSum, _Mapping]]] = ..., sums_without_personal: _Optional[_Iterable[_Union[MetricSum, _Mapping]]] = ...) -> None: ...

class MetricSum(_message.Message):
    __slots__ = ("metric", "name", "shape", "values")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    metric: str
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, metric: _Optional[str] = ..., name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class ReportEvaluationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportReleaseRequest(_message.Message):
    __slots__ = ("session_id", "model", "version", "outcome", "detail", "num_examples", "metrics", "metrics_before")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsBeforeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    METRICS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    version: int
    outcome: ReleaseOutcome
    detail: str
    num_examples: int
    metrics: _containers.ScalarMap[str, float]
    metrics_before: _containers.ScalarMap[str, float]
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[int] = ..., outcome: _Optional[_Union[ReleaseOutcome, str]] = ..., detail: _Optional[str] = ..., num_examples: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., metrics_before: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ReportReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
