import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.fl.v1 import coordinator_pb2 as _coordinator_pb2
from protos.fl.v1 import tensor_pb2 as _tensor_pb2
from protos.fl.v1 import training_pb2 as _training_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_WAITING: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_PAUSED: _ClassVar[RunState]
    RUN_STATE_COMPLETED: _ClassVar[RunState]
    RUN_STATE_STOPPED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]

class ClientState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLIENT_STATE_UNSPECIFIED: _ClassVar[ClientState]
    CLIENT_STATE_PRESENT: _ClassVar[ClientState]
    CLIENT_STATE_SUSPECT: _ClassVar[ClientState]
    CLIENT_STATE_LOST: _ClassVar[ClientState]

class ClientOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLIENT_ORDER_UNSPECIFIED: _ClassVar[ClientOrder]
    CLIENT_ORDER_ID: _ClassVar[ClientOrder]
    CLIENT_ORDER_STATE: _ClassVar[ClientOrder]
    CLIENT_ORDER_LAST_SEEN: _ClassVar[ClientOrder]
    CLIENT_ORDER_UPDATES_COUNTED: _ClassVar[ClientOrder]
    CLIENT_ORDER_UPDATES_REFUSED: _ClassVar[ClientOrder]
    CLIENT_ORDER_FAILED: _ClassVar[ClientOrder]
    CLIENT_ORDER_FAILED_SHARE: _ClassVar[ClientOrder]
    CLIENT_ORDER_WORK_SECONDS: _ClassVar[ClientOrder]
    CLIENT_ORDER_TRANSFER_SECONDS: _ClassVar[ClientOrder]
    CLIENT_ORDER_LAST_SHARE: _ClassVar[ClientOrder]
    CLIENT_ORDER_ATTENTION: _ClassVar[ClientOrder]
    CLIENT_ORDER_EPSILON: _ClassVar[ClientOrder]
    CLIENT_ORDER_VERSION: _ClassVar[ClientOrder]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_WAITING: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_PAUSED: RunState
RUN_STATE_COMPLETED: RunState
RUN_STATE_STOPPED: RunState
RUN_STATE_FAILED: RunState
CLIENT_STATE_UNSPECIFIED: ClientState
CLIENT_STATE_PRESENT: ClientState
CLIENT_STATE_SUSPECT: ClientState
CLIENT_STATE_LOST: ClientState
CLIENT_ORDER_UNSPECIFIED: ClientOrder
CLIENT_ORDER_ID: ClientOrder
CLIENT_ORDER_STATE: ClientOrder
CLIENT_ORDER_LAST_SEEN: ClientOrder
CLIENT_ORDER_UPDATES_COUNTED: ClientOrder
CLIENT_ORDER_UPDATES_REFUSED: ClientOrder
CLIENT_ORDER_FAILED: ClientOrder
CLIENT_ORDER_FAILED_SHARE: ClientOrder
CLIENT_ORDER_WORK_SECONDS: ClientOrder
CLIENT_ORDER_TRANSFER_SECONDS: ClientOrder
CLIENT_ORDER_LAST_SHARE: ClientOrder
CLIENT_ORDER_ATTENTION: ClientOrder
CLIENT_ORDER_EPSILON: ClientOrder
CLIENT_ORDER_VERSION: ClientOrder

class TaskSpec(_message.Message):
    __slots__ = ("name", "options", "frozen", "package")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: _struct_pb2.Struct
    frozen: str
    package: str
    def __init__(self, name: _Optional[str] = ..., options: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., frozen: _Optional[str] = ..., package: _Optional[str] = ...) -> None: ...

class LocalSpec(_message.Message):
    __slots__ = ("learning_rate", "learning_rate_decay", "epochs", "steps", "batch_size", "weight_decay", "max_gradient_norm", "learning_rate_changes", "optimizer", "schedule", "round_schedule", "micro_batch_size", "inexact", "continue_data")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_DECAY_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MAX_GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    ROUND_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_DATA_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    learning_rate_decay: float
    epochs: int
    steps: int
    batch_size: int
    weight_decay: float
    max_gradient_norm: float
    learning_rate_changes: _containers.RepeatedCompositeFieldContainer[LearningRateChange]
    optimizer: _training_pb2.OptimizerSpec
    schedule: _training_pb2.RateSchedule
    round_schedule: _training_pb2.RateSchedule
    micro_batch_size: int
    inexact: bool
    continue_data: bool
    def __init__(self, learning_rate: _Optional[float] = ..., learning_rate_decay: _Optional[float] = ..., epochs: _Optional[int] = ..., steps: _Optional[int] = ..., batch_size: _Optional[int] = ..., weight_decay: _Optional[float] = ..., max_gradient_norm: _Optional[float] = ..., learning_rate_changes: _Optional[_Iterable[_Union[LearningRateChange, _Mapping]]] = ..., optimizer: _Optional[_Union[_training_pb2.OptimizerSpec, _Mapping]] = ..., schedule: _Optional[_Union[_training_pb2.RateSchedule, _Mapping]] = ..., round_schedule: _Optional[_Union[_training_pb2.RateSchedule, _Mapping]] = ..., micro_batch_size: _Optional[int] = ..., inexact: _Optional[bool] = ..., continue_data: _Optional[bool] = ...) -> None: ...

class LearningRateChange(_message.Message):
    __slots__ = ("round", "learning_rate")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    round: int
    learning_rate: float
    def __init__(self, round: _Optional[int] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class RoundSpec(_message.Message):
    __slots__ = ("sampling", "clients_per_round", "rate", "min_clients", "close", "quorum", "deadline_s", "over_selection", "max_update_norm", "clip_update_norm", "max_relative_norm", "over_relative_norm", "reducer", "trim", "krum_byzantine", "krum_keep", "max_relative_payload", "max_client_share", "reducer_parameters", "reducer_fingerprint", "min_accepted", "goal", "concurrency", "max_staleness", "staleness", "stale_direction")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    MIN_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    OVER_SELECTION_FIELD_NUMBER: _ClassVar[int]
    MAX_UPDATE_NORM_FIELD_NUMBER: _ClassVar[int]
    CLIP_UPDATE_NORM_FIELD_NUMBER: _ClassVar[int]
    MAX_RELATIVE_NORM_FIELD_NUMBER: _ClassVar[int]
    OVER_RELATIVE_NORM_FIELD_NUMBER: _ClassVar[int]
    REDUCER_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    KRUM_BYZANTINE_FIELD_NUMBER: _ClassVar[int]
    KRUM_KEEP_FIELD_NUMBER: _ClassVar[int]
    MAX_RELATIVE_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MAX_CLIENT_SHARE_FIELD_NUMBER: _ClassVar[int]
    REDUCER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    REDUCER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALE_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    sampling: str
    clients_per_round: int
    rate: float
    min_clients: int
    close: str
    quorum: int
    deadline_s: float
    over_selection: float
    max_update_norm: float
    clip_update_norm: float
    max_relative_norm: float
    over_relative_norm: str
    reducer: str
    trim: float
    krum_byzantine: int
    krum_keep: int
    max_relative_payload: float
    max_client_share: float
    reducer_parameters: _struct_pb2.Struct
    reducer_fingerprint: _training_pb2.TaskFingerprint
    min_accepted: int
    goal: int
    concurrency: int
    max_staleness: int
    staleness: StalenessSpec
    stale_direction: str
    def __init__(self, sampling: _Optional[str] = ..., clients_per_round: _Optional[int] = ..., rate: _Optional[float] = ..., min_clients: _Optional[int] = ..., close: _Optional[str] = ..., quorum: _Optional[int] = ..., deadline_s: _Optional[float] = ..., over_selection: _Optional[float] = ..., max_update_norm: _Optional[float] = ..., clip_update_norm: _Optional[float] = ..., max_relative_norm: _Optional[float] = ..., over_relative_norm: _Optional[str] = ..., reducer: _Optional[str] = ..., trim: _Optional[float] = ..., krum_byzantine: _Optional[int] = ..., krum_keep: _Optional[int] = ..., max_relative_payload: _Optional[float] = ..., max_client_share: _Optional[float] = ..., reducer_parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., reducer_fingerprint: _Optional[_Union[_training_pb2.TaskFingerprint, _Mapping]] = ..., min_accepted: _Optional[int] = ..., goal: _Optional[int] = ..., concurrency: _Optional[int] = ..., max_staleness: _Optional[int] = ..., staleness: _Optional[_Union[StalenessSpec, _Mapping]] = ..., stale_direction: _Optional[str] = ...) -> None: ...

class StalenessSpec(_message.Message):
    __slots__ = ("kind", "exponent", "slope", "after", "fingerprint")
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    SLOPE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    exponent: float
    slope: float
    after: int
    fingerprint: _training_pb2.TaskFingerprint
    def __init__(self, kind: _Optional[str] = ..., exponent: _Optional[float] = ..., slope: _Optional[float] = ..., after: _Optional[int] = ..., fingerprint: _Optional[_Union[_training_pb2.TaskFingerprint, _Mapping]] = ...) -> None: ...

class StopSpec(_message.Message):
    __slots__ = ("rounds", "metric", "target", "patience", "wall_time_s", "lower_is_better")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    LOWER_IS_BETTER_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    metric: str
    target: float
    patience: int
    wall_time_s: float
    lower_is_better: bool
    def __init__(self, rounds: _Optional[int] = ..., metric: _Optional[str] = ..., target: _Optional[float] = ..., patience: _Optional[int] = ..., wall_time_s: _Optional[float] = ..., lower_is_better: _Optional[bool] = ...) -> None: ...

class EvaluationSpec(_message.Message):
    __slots__ = ("every", "batch_size", "clients_every", "clients", "clients_deadline_s", "averaged_on_clients")
    EVERY_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_EVERY_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_ON_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    every: int
    batch_size: int
    clients_every: int
    clients: int
    clients_deadline_s: float
    averaged_on_clients: bool
    def __init__(self, every: _Optional[int] = ..., batch_size: _Optional[int] = ..., clients_every: _Optional[int] = ..., clients: _Optional[int] = ..., clients_deadline_s: _Optional[float] = ..., averaged_on_clients: _Optional[bool] = ...) -> None: ...

class EncodingsSpec(_message.Message):
    __slots__ = ("update", "model", "direction", "fraction", "reference", "difference")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    update: str
    model: str
    direction: str
    fraction: float
    reference: str
    difference: str
    def __init__(self, update: _Optional[str] = ..., model: _Optional[str] = ..., direction: _Optional[str] = ..., fraction: _Optional[float] = ..., reference: _Optional[str] = ..., difference: _Optional[str] = ...) -> None: ...

class AveragingSpec(_message.Message):
    __slots__ = ("method", "decay", "start", "window", "statistics")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    method: str
    decay: float
    start: int
    window: int
    statistics: str
    def __init__(self, method: _Optional[str] = ..., decay: _Optional[float] = ..., start: _Optional[int] = ..., window: _Optional[int] = ..., statistics: _Optional[str] = ...) -> None: ...

class PrivacySpec(_message.Message):
    __slots__ = ("unit", "noise_multiplier", "clip", "delta", "max_epsilon", "account", "clip_quantile", "clip_rate", "clip_noise")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    MAX_EPSILON_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    CLIP_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    CLIP_RATE_FIELD_NUMBER: _ClassVar[int]
    CLIP_NOISE_FIELD_NUMBER: _ClassVar[int]
    unit: str
    noise_multiplier: float
    clip: float
    delta: float
    max_epsilon: float
    account: str
    clip_quantile: float
    clip_rate: float
    clip_noise: float
    def __init__(self, unit: _Optional[str] = ..., noise_multiplier: _Optional[float] = ..., clip: _Optional[float] = ..., delta: _Optional[float] = ..., max_epsilon: _Optional[float] = ..., account: _Optional[str] = ..., clip_quantile: _Optional[float] = ..., clip_rate: _Optional[float] = ..., clip_noise: _Optional[float] = ...) -> None: ...

class SecureAggregationSpec(_message.Message):
    __slots__ = ("protocol", "bits", "clip", "min_clients", "max_corrupt", "max_dropped", "on_drop", "stage_s", "suite", "max_examples", "clips", "min_steps", "metrics")
    class ClipsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    MIN_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    MAX_DROPPED_FIELD_NUMBER: _ClassVar[int]
    ON_DROP_FIELD_NUMBER: _ClassVar[int]
    STAGE_S_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    MAX_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLIPS_FIELD_NUMBER: _ClassVar[int]
    MIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    protocol: str
    bits: int
    clip: float
    min_clients: int
    max_corrupt: float
    max_dropped: float
    on_drop: str
    stage_s: float
    suite: str
    max_examples: int
    clips: _containers.ScalarMap[str, float]
    min_steps: int
    metrics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[str] = ..., bits: _Optional[int] = ..., clip: _Optional[float] = ..., min_clients: _Optional[int] = ..., max_corrupt: _Optional[float] = ..., max_dropped: _Optional[float] = ..., on_drop: _Optional[str] = ..., stage_s: _Optional[float] = ..., suite: _Optional[str] = ..., max_examples: _Optional[int] = ..., clips: _Optional[_Mapping[str, float]] = ..., min_steps: _Optional[int] = ..., metrics: _Optional[_Iterable[str]] = ...) -> None: ...

class RunSpec(_message.Message):
    __slots__ = ("name", "task", "algorithm", "local", "round", "stop", "evaluation", "seed", "labels", "min_client_version", "population", "initial_model", "keep_checkpoints", "population_examples", "planned_rounds", "owner", "personal", "encodings", "averaging", "privacy", "secure_aggregation")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    MIN_CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    KEEP_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    POPULATION_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    SECURE_AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    task: TaskSpec
    algorithm: _training_pb2.AlgorithmSpec
    local: LocalSpec
    round: RoundSpec
    stop: StopSpec
    evaluation: EvaluationSpec
    seed: int
    labels: _containers.ScalarMap[str, str]
    min_client_version: str
    population: int
    initial_model: str
    keep_checkpoints: int
    population_examples: int
    planned_rounds: int
    owner: str
    personal: _containers.RepeatedScalarFieldContainer[str]
    encodings: EncodingsSpec
    averaging: AveragingSpec
    privacy: PrivacySpec
    secure_aggregation: SecureAggregationSpec
    def __init__(self, name: _Optional[str] = ..., task: _Optional[_Union[TaskSpec, _Mapping]] = ..., algorithm: _Optional[_Union[_training_pb2.AlgorithmSpec, _Mapping]] = ..., local: _Optional[_Union[LocalSpec, _Mapping]] = ..., round: _Optional[_Union[RoundSpec, _Mapping]] = ..., stop: _Optional[_Union[StopSpec, _Mapping]] = ..., evaluation: _Optional[_Union[EvaluationSpec, _Mapping]] = ..., seed: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., min_client_version: _Optional[str] = ..., population: _Optional[int] = ..., initial_model: _Optional[str] = ..., keep_checkpoints: _Optional[int] = ..., population_examples: _Optional[int] = ..., planned_rounds: _Optional[int] = ..., owner: _Optional[str] = ..., personal: _Optional[_Iterable[str]] = ..., encodings: _Optional[_Union[EncodingsSpec, _Mapping]] = ..., averaging: _Optional[_Union[AveragingSpec, _Mapping]] = ..., privacy: _Optional[_Union[PrivacySpec, _Mapping]] = ..., secure_aggregation: _Optional[_Union[SecureAggregationSpec, _Mapping]] = ...) -> None: ...

class RoundAccount(_message.Message):
    __slots__ = ("norms", "cosine", "assignments", "refused", "staleness", "seconds", "quorum_missed", "short", "why_short", "secure")
    class NormsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class AssignmentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SecureEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NORMS_FIELD_NUMBER: _ClassVar[int]
    COSINE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_MISSED_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    WHY_SHORT_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    norms: _containers.ScalarMap[str, float]
    cosine: float
    assignments: _containers.ScalarMap[str, int]
    refused: _containers.ScalarMap[str, int]
    staleness: _containers.ScalarMap[int, int]
    seconds: _containers.ScalarMap[str, float]
    quorum_missed: int
    short: int
    why_short: str
    secure: _containers.ScalarMap[str, int]
    def __init__(self, norms: _Optional[_Mapping[str, float]] = ..., cosine: _Optional[float] = ..., assignments: _Optional[_Mapping[str, int]] = ..., refused: _Optional[_Mapping[str, int]] = ..., staleness: _Optional[_Mapping[int, int]] = ..., seconds: _Optional[_Mapping[str, float]] = ..., quorum_missed: _Optional[int] = ..., short: _Optional[int] = ..., why_short: _Optional[str] = ..., secure: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RoundSummary(_message.Message):
    __slots__ = ("round", "committed", "seconds", "attempts", "accepted", "dropped", "training_loss", "metrics", "bytes_down", "bytes_up", "model_digest", "state_epoch", "account", "local_epochs", "averaged_digest", "cohort_hidden")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TRAINING_LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COHORT_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    round: int
    committed: _timestamp_pb2.Timestamp
    seconds: float
    attempts: int
    accepted: int
    dropped: int
    training_loss: float
    metrics: _containers.ScalarMap[str, float]
    bytes_down: int
    bytes_up: int
    model_digest: str
    state_epoch: int
    account: RoundAccount
    local_epochs: _containers.RepeatedCompositeFieldContainer[_training_pb2.EpochMetrics]
    averaged_digest: str
    cohort_hidden: bool
    def __init__(self, round: _Optional[int] = ..., committed: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., seconds: _Optional[float] = ..., attempts: _Optional[int] = ..., accepted: _Optional[int] = ..., dropped: _Optional[int] = ..., training_loss: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., bytes_down: _Optional[int] = ..., bytes_up: _Optional[int] = ..., model_digest: _Optional[str] = ..., state_epoch: _Optional[int] = ..., account: _Optional[_Union[RoundAccount, _Mapping]] = ..., local_epochs: _Optional[_Iterable[_Union[_training_pb2.EpochMetrics, _Mapping]]] = ..., averaged_digest: _Optional[str] = ..., cohort_hidden: _Optional[bool] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "spec", "state", "reason", "rounds_done", "phase", "attempt", "cohort", "admitted", "created", "ended", "latest", "best", "bytes_down", "bytes_up", "eligible_clients", "over_selection", "account", "newest_metrics", "best_metrics", "awaited", "awaited_count", "deadline_left_s", "waiting_for", "policy_refusals", "states", "lower_is_better", "latest_failure", "below_due", "first_below_due", "cohort_size", "privacy", "cohorts_hidden", "clients_authority", "stated_privacy", "buffer")
    class NewestMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class BestMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PolicyRefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LowerIsBetterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bool] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_DONE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    OVER_SELECTION_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_METRICS_FIELD_NUMBER: _ClassVar[int]
    BEST_METRICS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    AWAITED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    POLICY_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LOWER_IS_BETTER_FIELD_NUMBER: _ClassVar[int]
    LATEST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    BELOW_DUE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BELOW_DUE_FIELD_NUMBER: _ClassVar[int]
    COHORT_SIZE_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    COHORTS_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    STATED_PRIVACY_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec: RunSpec
    state: RunState
    reason: str
    rounds_done: int
    phase: str
    attempt: int
    cohort: _containers.RepeatedScalarFieldContainer[str]
    admitted: int
    created: _timestamp_pb2.Timestamp
    ended: _timestamp_pb2.Timestamp
    latest: RoundSummary
    best: RoundSummary
    bytes_down: int
    bytes_up: int
    eligible_clients: int
    over_selection: float
    account: RoundAccount
    newest_metrics: _containers.ScalarMap[str, float]
    best_metrics: _containers.ScalarMap[str, float]
    awaited: _containers.RepeatedScalarFieldContainer[str]
    awaited_count: int
    deadline_left_s: float
    waiting_for: str
    policy_refusals: _containers.ScalarMap[str, int]
    states: StateMembers
    lower_is_better: _containers.ScalarMap[str, bool]
    latest_failure: FailedWork
    below_due: int
    first_below_due: _containers.RepeatedCompositeFieldContainer[ClientShare]
    cohort_size: int
    privacy: PrivacyStatus
    cohorts_hidden: bool
    clients_authority: str
    stated_privacy: StatedPrivacy
    buffer: BufferStatus
    def __init__(self, run_id: _Optional[str] = ..., spec: _Optional[_Union[RunSpec, _Mapping]] = ..., state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ..., rounds_done: _Optional[int] = ..., phase: _Optional[str] = ..., attempt: _Optional[int] = ..., cohort: _Optional[_Iterable[str]] = ..., admitted: _Optional[int] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., latest: _Optional[_Union[RoundSummary, _Mapping]] = ..., best: _Optional[_Union[RoundSummary, _Mapping]] = ..., bytes_down: _Optional[int] = ..., bytes_up: _Optional[int] = ..., eligible_clients: _Optional[int] = ..., over_selection: _Optional[float] = ..., account: _Optional[_Union[RoundAccount, _Mapping]] = ..., newest_metrics: _Optional[_Mapping[str, float]] = ..., best_metrics: _Optional[_Mapping[str, float]] = ..., awaited: _Optional[_Iterable[str]] = ..., awaited_count: _Optional[int] = ..., deadline_left_s: _Optional[float] = ..., waiting_for: _Optional[str] = ..., policy_refusals: _Optional[_Mapping[str, int]] = ..., states: _Optional[_Union[StateMembers, _Mapping]] = ..., lower_is_better: _Optional[_Mapping[str, bool]] = ..., latest_failure: _Optional[_Union[FailedWork, _Mapping]] = ..., below_due: _Optional[int] = ..., first_below_due: _Optional[_Iterable[_Union[ClientShare, _Mapping]]] = ..., cohort_size: _Optional[int] = ..., privacy: _Optional[_Union[PrivacyStatus, _Mapping]] = ..., cohorts_hidden: _Optional[bool] = ..., clients_authority: _Optional[str] = ..., stated_privacy: _Optional[_Union[StatedPrivacy, _Mapping]] = ..., buffer: _Optional[_Union[BufferStatus, _Mapping]] = ...) -> None: ...

class BufferStatus(_message.Message):
    __slots__ = ("updates", "goal", "working", "versions", "oldest")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    updates: int
    goal: int
    working: int
    versions: int
    oldest: int
    def __init__(self, updates: _Optional[int] = ..., goal: _Optional[int] = ..., working: _Optional[int] = ..., versions: _Optional[int] = ..., oldest: _Optional[int] = ...) -> None: ...

class StatedPrivacy(_message.Message):
    __slots__ = ("clients", "median", "largest", "delta")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    clients: int
    median: float
    largest: float
    delta: float
    def __init__(self, clients: _Optional[int] = ..., median: _Optional[float] = ..., largest: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class PrivacyStatus(_message.Message):
    __slots__ = ("account", "epsilon", "epsilon_of_seen_cohorts", "draws", "most_draws", "clip", "tight_epsilon", "tight_epsilon_of_seen_cohorts")
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    EPSILON_OF_SEEN_COHORTS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    MOST_DRAWS_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    TIGHT_EPSILON_FIELD_NUMBER: _ClassVar[int]
    TIGHT_EPSILON_OF_SEEN_COHORTS_FIELD_NUMBER: _ClassVar[int]
    account: str
    epsilon: float
    epsilon_of_seen_cohorts: float
    draws: int
    most_draws: int
    clip: float
    tight_epsilon: float
    tight_epsilon_of_seen_cohorts: float
    def __init__(self, account: _Optional[str] = ..., epsilon: _Optional[float] = ..., epsilon_of_seen_cohorts: _Optional[float] = ..., draws: _Optional[int] = ..., most_draws: _Optional[int] = ..., clip: _Optional[float] = ..., tight_epsilon: _Optional[float] = ..., tight_epsilon_of_seen_cohorts: _Optional[float] = ...) -> None: ...

class ClientShare(_message.Message):
    __slots__ = ("client_id", "counted", "due")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    counted: int
    due: float
    def __init__(self, client_id: _Optional[str] = ..., counted: _Optional[int] = ..., due: _Optional[float] = ...) -> None: ...

class FailedWork(_message.Message):
    __slots__ = ("client_id", "round", "message", "time", "clients")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    round: int
    message: str
    time: _timestamp_pb2.Timestamp
    clients: int
    def __init__(self, client_id: _Optional[str] = ..., round: _Optional[int] = ..., message: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., clients: _Optional[int] = ...) -> None: ...

class StateMembers(_message.Message):
    __slots__ = ("members", "missing", "first_missing", "left_out", "first_left_out")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSING_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    members: int
    missing: int
    first_missing: _containers.RepeatedScalarFieldContainer[str]
    left_out: int
    first_left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, members: _Optional[int] = ..., missing: _Optional[int] = ..., first_missing: _Optional[_Iterable[str]] = ..., left_out: _Optional[int] = ..., first_left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: RunSpec
    def __init__(self, spec: _Optional[_Union[RunSpec, _Mapping]] = ...) -> None: ...

class CreateRunResponse(_message.Message):
    __slots__ = ("run", "remarks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    REMARKS_FIELD_NUMBER: _ClassVar[int]
    run: RunStatus
    remarks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[_Union[RunStatus, _Mapping]] = ..., remarks: _Optional[_Iterable[str]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs", "next_page_token")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    next_page_token: str
    def __init__(self, runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id", "with_rounds")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    with_rounds: bool
    def __init__(self, run_id: _Optional[str] = ..., with_rounds: _Optional[bool] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run", "rounds")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    run: RunStatus
    rounds: _containers.RepeatedCompositeFieldContainer[RoundSummary]
    def __init__(self, run: _Optional[_Union[RunStatus, _Mapping]] = ..., rounds: _Optional[_Iterable[_Union[RoundSummary, _Mapping]]] = ...) -> None: ...

class ListRoundsRequest(_message.Message):
    __slots__ = ("run_id", "page_size", "page_token", "first_round")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    page_size: int
    page_token: str
    first_round: int
    def __init__(self, run_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., first_round: _Optional[int] = ...) -> None: ...

class ListRoundsResponse(_message.Message):
    __slots__ = ("rounds", "next_page_token")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundSummary]
    next_page_token: str
    def __init__(self, rounds: _Optional[_Iterable[_Union[RoundSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("run_id", "first_round")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    first_round: int
    def __init__(self, run_id: _Optional[str] = ..., first_round: _Optional[int] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("run", "event", "round", "detail")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    run: RunStatus
    event: str
    round: RoundSummary
    detail: str
    def __init__(self, run: _Optional[_Union[RunStatus, _Mapping]] = ..., event: _Optional[str] = ..., round: _Optional[_Union[RoundSummary, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class PauseRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class PauseRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunStatus
    def __init__(self, run: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ("run_id", "learning_rate")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    learning_rate: float
    def __init__(self, run_id: _Optional[str] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class ResumeRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunStatus
    def __init__(self, run: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class ExtendRunRequest(_message.Message):
    __slots__ = ("run_id", "rounds", "wall_time_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    rounds: int
    wall_time_s: float
    def __init__(self, run_id: _Optional[str] = ..., rounds: _Optional[int] = ..., wall_time_s: _Optional[float] = ...) -> None: ...

class ExtendRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunStatus
    def __init__(self, run: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("run_id", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StopRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunStatus
    def __init__(self, run: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class DeleteRunRequest(_message.Message):
    __slots__ = ("run_id", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DeleteRunResponse(_message.Message):
    __slots__ = ("finished",)
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    def __init__(self, finished: _Optional[bool] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("until", "refusals", "reason")
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    until: _timestamp_pb2.Timestamp
    refusals: int
    reason: str
    def __init__(self, until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., refusals: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("client_id", "state", "banned", "draining", "availability", "labels", "device", "tasks", "software", "last_seen", "run_id", "updates_counted", "updates_refused", "note", "quarantine", "policy_refusals", "methods", "certificate_end", "enrolled_labels", "work", "attention")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PolicyRefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATES_COUNTED_FIELD_NUMBER: _ClassVar[int]
    UPDATES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    POLICY_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_END_FIELD_NUMBER: _ClassVar[int]
    ENROLLED_LABELS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    state: ClientState
    banned: bool
    draining: bool
    availability: _coordinator_pb2.Availability
    labels: _containers.ScalarMap[str, str]
    device: _coordinator_pb2.Device
    tasks: _containers.RepeatedCompositeFieldContainer[_coordinator_pb2.TaskOffer]
    software: str
    last_seen: _timestamp_pb2.Timestamp
    run_id: str
    updates_counted: int
    updates_refused: int
    note: str
    quarantine: Quarantine
    policy_refusals: _containers.ScalarMap[str, str]
    methods: _containers.RepeatedCompositeFieldContainer[_coordinator_pb2.MethodOffer]
    certificate_end: _timestamp_pb2.Timestamp
    enrolled_labels: _containers.RepeatedScalarFieldContainer[str]
    work: ClientWork
    attention: _containers.RepeatedCompositeFieldContainer[Attention]
    def __init__(self, client_id: _Optional[str] = ..., state: _Optional[_Union[ClientState, str]] = ..., banned: _Optional[bool] = ..., draining: _Optional[bool] = ..., availability: _Optional[_Union[_coordinator_pb2.Availability, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., device: _Optional[_Union[_coordinator_pb2.Device, _Mapping]] = ..., tasks: _Optional[_Iterable[_Union[_coordinator_pb2.TaskOffer, _Mapping]]] = ..., software: _Optional[str] = ..., last_seen: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., run_id: _Optional[str] = ..., updates_counted: _Optional[int] = ..., updates_refused: _Optional[int] = ..., note: _Optional[str] = ..., quarantine: _Optional[_Union[Quarantine, _Mapping]] = ..., policy_refusals: _Optional[_Mapping[str, str]] = ..., methods: _Optional[_Iterable[_Union[_coordinator_pb2.MethodOffer, _Mapping]]] = ..., certificate_end: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., enrolled_labels: _Optional[_Iterable[str]] = ..., work: _Optional[_Union[ClientWork, _Mapping]] = ..., attention: _Optional[_Iterable[_Union[Attention, _Mapping]]] = ...) -> None: ...

class ClientWork(_message.Message):
    __slots__ = ("assignments", "admitted", "refused", "failed", "lost", "newest", "last_failure", "last_refusal", "work_s", "transfer_s", "rounds", "rounds_last", "newest_rounds", "newest_rounds_last", "slowness", "epsilon", "delta")
    class NewestEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    LAST_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_LAST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_ROUNDS_LAST_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    assignments: int
    admitted: int
    refused: int
    failed: int
    lost: int
    newest: _containers.ScalarMap[str, int]
    last_failure: EndedWork
    last_refusal: EndedWork
    work_s: float
    transfer_s: float
    rounds: int
    rounds_last: int
    newest_rounds: int
    newest_rounds_last: int
    slowness: float
    epsilon: float
    delta: float
    def __init__(self, assignments: _Optional[int] = ..., admitted: _Optional[int] = ..., refused: _Optional[int] = ..., failed: _Optional[int] = ..., lost: _Optional[int] = ..., newest: _Optional[_Mapping[str, int]] = ..., last_failure: _Optional[_Union[EndedWork, _Mapping]] = ..., last_refusal: _Optional[_Union[EndedWork, _Mapping]] = ..., work_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., rounds: _Optional[int] = ..., rounds_last: _Optional[int] = ..., newest_rounds: _Optional[int] = ..., newest_rounds_last: _Optional[int] = ..., slowness: _Optional[float] = ..., epsilon: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class EndedWork(_message.Message):
    __slots__ = ("run_id", "round", "cause", "message", "time")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    cause: str
    message: str
    time: _timestamp_pb2.Timestamp
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., cause: _Optional[str] = ..., message: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Attention(_message.Message):
    __slots__ = ("reason", "why", "remedy", "run_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    why: str
    remedy: str
    run_id: str
    def __init__(self, reason: _Optional[str] = ..., why: _Optional[str] = ..., remedy: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class ClientInNeed(_message.Message):
    __slots__ = ("client_id", "attention")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    attention: Attention
    def __init__(self, client_id: _Optional[str] = ..., attention: _Optional[_Union[Attention, _Mapping]] = ...) -> None: ...

class ClientOrigin(_message.Message):
    __slots__ = ("address", "instance_id", "registered", "certificate_serial", "certificate_end")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_SERIAL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_END_FIELD_NUMBER: _ClassVar[int]
    address: str
    instance_id: str
    registered: _timestamp_pb2.Timestamp
    certificate_serial: str
    certificate_end: _timestamp_pb2.Timestamp
    def __init__(self, address: _Optional[str] = ..., instance_id: _Optional[str] = ..., registered: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., certificate_serial: _Optional[str] = ..., certificate_end: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetClientRequest(_message.Message):
    __slots__ = ("client_id", "history")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    history: int
    def __init__(self, client_id: _Optional[str] = ..., history: _Optional[int] = ...) -> None: ...

class GetClientResponse(_message.Message):
    __slots__ = ("client", "session", "refused", "fenced", "conflicts", "contested", "standing", "work", "history", "not_drawn")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    CONTESTED_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    NOT_DRAWN_FIELD_NUMBER: _ClassVar[int]
    client: ClientStatus
    session: ClientOrigin
    refused: ClientOrigin
    fenced: ClientOrigin
    conflicts: int
    contested: bool
    standing: Quarantine
    work: str
    history: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    not_drawn: _containers.RepeatedCompositeFieldContainer[NotDrawn]
    def __init__(self, client: _Optional[_Union[ClientStatus, _Mapping]] = ..., session: _Optional[_Union[ClientOrigin, _Mapping]] = ..., refused: _Optional[_Union[ClientOrigin, _Mapping]] = ..., fenced: _Optional[_Union[ClientOrigin, _Mapping]] = ..., conflicts: _Optional[int] = ..., contested: _Optional[bool] = ..., standing: _Optional[_Union[Quarantine, _Mapping]] = ..., work: _Optional[str] = ..., history: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., not_drawn: _Optional[_Iterable[_Union[NotDrawn, _Mapping]]] = ...) -> None: ...

class NotDrawn(_message.Message):
    __slots__ = ("run_id", "reason", "why", "remedy")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    why: str
    remedy: str
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., why: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class ListClientsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "state", "labels", "search", "order", "descending", "marks", "older_than")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DESCENDING_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    state: ClientState
    labels: _containers.ScalarMap[str, str]
    search: str
    order: ClientOrder
    descending: bool
    marks: _containers.RepeatedScalarFieldContainer[str]
    older_than: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., state: _Optional[_Union[ClientState, str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., search: _Optional[str] = ..., order: _Optional[_Union[ClientOrder, str]] = ..., descending: _Optional[bool] = ..., marks: _Optional[_Iterable[str]] = ..., older_than: _Optional[str] = ...) -> None: ...

class ListClientsResponse(_message.Message):
    __slots__ = ("clients", "next_page_token", "found")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedCompositeFieldContainer[ClientStatus]
    next_page_token: str
    found: int
    def __init__(self, clients: _Optional[_Iterable[_Union[ClientStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., found: _Optional[int] = ...) -> None: ...

class BanClientRequest(_message.Message):
    __slots__ = ("client_id", "reason")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    reason: str
    def __init__(self, client_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class BanClientResponse(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: ClientStatus
    def __init__(self, client: _Optional[_Union[ClientStatus, _Mapping]] = ...) -> None: ...

class UnbanClientRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class UnbanClientResponse(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: ClientStatus
    def __init__(self, client: _Optional[_Union[ClientStatus, _Mapping]] = ...) -> None: ...

class ReleaseClientRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class ReleaseClientResponse(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: ClientStatus
    def __init__(self, client: _Optional[_Union[ClientStatus, _Mapping]] = ...) -> None: ...

class ForgetClientRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class ForgetClientResponse(_message.Message):
    __slots__ = ("still_banned",)
    STILL_BANNED_FIELD_NUMBER: _ClassVar[int]
    still_banned: bool
    def __init__(self, still_banned: _Optional[bool] = ...) -> None: ...

class DrainClientRequest(_message.Message):
    __slots__ = ("client_id", "reason", "undo")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    reason: str
    undo: bool
    def __init__(self, client_id: _Optional[str] = ..., reason: _Optional[str] = ..., undo: _Optional[bool] = ...) -> None: ...

class DrainClientResponse(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: ClientStatus
    def __init__(self, client: _Optional[_Union[ClientStatus, _Mapping]] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("run_id", "round", "model")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: str
    model: str
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ExportHeader(_message.Message):
    __slots__ = ("round", "size_bytes", "digest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    round: RoundSummary
    size_bytes: int
    digest: _tensor_pb2.Digest
    def __init__(self, round: _Optional[_Union[RoundSummary, _Mapping]] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ExportHeader
    chunk: _tensor_pb2.Chunk
    def __init__(self, header: _Optional[_Union[ExportHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.Chunk, _Mapping]] = ...) -> None: ...

class UploadModelHeader(_message.Message):
    __slots__ = ("size_bytes", "digest", "release")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    digest: _tensor_pb2.Digest
    release: bool
    def __init__(self, size_bytes: _Optional[int] = ..., digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ..., release: _Optional[bool] = ...) -> None: ...

class UploadModelRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: UploadModelHeader
    chunk: _tensor_pb2.Chunk
    def __init__(self, header: _Optional[_Union[UploadModelHeader, _Mapping]] = ..., chunk: _Optional[_Union[_tensor_pb2.Chunk, _Mapping]] = ...) -> None: ...

class UploadModelResponse(_message.Message):
    __slots__ = ("initial_model",)
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    initial_model: str
    def __init__(self, initial_model: _Optional[str] = ...) -> None: ...

class CohortMember(_message.Message):
    __slots__ = ("client_id", "phase", "done_bytes", "size_bytes", "phase_s", "detail")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    phase: str
    done_bytes: int
    size_bytes: int
    phase_s: float
    detail: str
    def __init__(self, client_id: _Optional[str] = ..., phase: _Optional[str] = ..., done_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., phase_s: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class ListCohortRequest(_message.Message):
    __slots__ = ("run_id", "page_size", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    page_size: int
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCohortResponse(_message.Message):
    __slots__ = ("members", "next_page_token", "round", "exchange", "by_phase")
    class ByPhaseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    BY_PHASE_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[CohortMember]
    next_page_token: str
    round: int
    exchange: int
    by_phase: _containers.ScalarMap[str, int]
    def __init__(self, members: _Optional[_Iterable[_Union[CohortMember, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., round: _Optional[int] = ..., exchange: _Optional[int] = ..., by_phase: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ClientEvaluation(_message.Message):
    __slots__ = ("client_id", "num_examples", "metrics", "reported")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    num_examples: int
    metrics: _containers.ScalarMap[str, float]
    reported: _timestamp_pb2.Timestamp
    def __init__(self, client_id: _Optional[str] = ..., num_examples: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., reported: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListEvaluationsRequest(_message.Message):
    __slots__ = ("run_id", "round", "page_size", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    page_size: int
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListEvaluationsResponse(_message.Message):
    __slots__ = ("round", "evaluations", "next_page_token", "lower_is_better")
    class LowerIsBetterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bool] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOWER_IS_BETTER_FIELD_NUMBER: _ClassVar[int]
    round: RoundSummary
    evaluations: _containers.RepeatedCompositeFieldContainer[ClientEvaluation]
    next_page_token: str
    lower_is_better: _containers.ScalarMap[str, bool]
    def __init__(self, round: _Optional[_Union[RoundSummary, _Mapping]] = ..., evaluations: _Optional[_Iterable[_Union[ClientEvaluation, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., lower_is_better: _Optional[_Mapping[str, bool]] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("time", "actor", "event", "subject", "detail", "number")
    TIME_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    actor: str
    event: str
    subject: str
    detail: str
    number: int
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., actor: _Optional[str] = ..., event: _Optional[str] = ..., subject: _Optional[str] = ..., detail: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ListHistoryRequest(_message.Message):
    __slots__ = ("subject", "limit", "page_size", "page_token", "before_number")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BEFORE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    subject: str
    limit: int
    page_size: int
    page_token: str
    before_number: int
    def __init__(self, subject: _Optional[str] = ..., limit: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., before_number: _Optional[int] = ...) -> None: ...

class ListHistoryResponse(_message.Message):
    __slots__ = ("entries", "next_page_token", "first_number")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    next_page_token: str
    first_number: int
    def __init__(self, entries: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., first_number: _Optional[int] = ...) -> None: ...

class WatchHistoryRequest(_message.Message):
    __slots__ = ("after_number", "subject")
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    after_number: int
    subject: str
    def __init__(self, after_number: _Optional[int] = ..., subject: _Optional[str] = ...) -> None: ...

class WatchHistoryResponse(_message.Message):
    __slots__ = ("entries", "last_number")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    last_number: int
    def __init__(self, entries: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., last_number: _Optional[int] = ...) -> None: ...

class MetricPoint(_message.Message):
    __slots__ = ("round", "value")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    round: int
    value: float
    def __init__(self, round: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class RunOverview(_message.Message):
    __slots__ = ("run_id", "state", "reason", "task", "algorithm", "owner", "rounds_done", "rounds_planned", "phase", "cohort_size", "admitted", "created", "ended", "latest_commit", "metric", "best", "newest_metrics", "points", "labels_suspected", "below_due", "waiting_for", "awaited", "awaited_count", "deadline_left_s", "cohorts_hidden")
    class NewestMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    COHORT_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LATEST_COMMIT_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_METRICS_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    BELOW_DUE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    AWAITED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    COHORTS_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: RunState
    reason: str
    task: str
    algorithm: str
    owner: str
    rounds_done: int
    rounds_planned: int
    phase: str
    cohort_size: int
    admitted: int
    created: _timestamp_pb2.Timestamp
    ended: _timestamp_pb2.Timestamp
    latest_commit: _timestamp_pb2.Timestamp
    metric: str
    best: float
    newest_metrics: _containers.ScalarMap[str, float]
    points: _containers.RepeatedCompositeFieldContainer[MetricPoint]
    labels_suspected: int
    below_due: int
    waiting_for: str
    awaited: _containers.RepeatedScalarFieldContainer[str]
    awaited_count: int
    deadline_left_s: float
    cohorts_hidden: bool
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ..., task: _Optional[str] = ..., algorithm: _Optional[str] = ..., owner: _Optional[str] = ..., rounds_done: _Optional[int] = ..., rounds_planned: _Optional[int] = ..., phase: _Optional[str] = ..., cohort_size: _Optional[int] = ..., admitted: _Optional[int] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., latest_commit: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., metric: _Optional[str] = ..., best: _Optional[float] = ..., newest_metrics: _Optional[_Mapping[str, float]] = ..., points: _Optional[_Iterable[_Union[MetricPoint, _Mapping]]] = ..., labels_suspected: _Optional[int] = ..., below_due: _Optional[int] = ..., waiting_for: _Optional[str] = ..., awaited: _Optional[_Iterable[str]] = ..., awaited_count: _Optional[int] = ..., deadline_left_s: _Optional[float] = ..., cohorts_hidden: _Optional[bool] = ...) -> None: ...

class GetOverviewRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "states", "search", "points")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    states: _containers.RepeatedScalarFieldContainer[RunState]
    search: str
    points: int
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., states: _Optional[_Iterable[_Union[RunState, str]]] = ..., search: _Optional[str] = ..., points: _Optional[int] = ...) -> None: ...

class GetOverviewResponse(_message.Message):
    __slots__ = ("runs", "next_page_token", "runs_by_state", "clients_by_state", "history_number", "version", "now", "runs_found", "attention", "leadership")
    class RunsByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ClientsByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUNS_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    RUNS_FOUND_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LEADERSHIP_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunOverview]
    next_page_token: str
    runs_by_state: _containers.ScalarMap[str, int]
    clients_by_state: _containers.ScalarMap[str, int]
    history_number: int
    version: str
    now: _timestamp_pb2.Timestamp
    runs_found: int
    attention: _containers.RepeatedCompositeFieldContainer[ClientInNeed]
    leadership: Leadership
    def __init__(self, runs: _Optional[_Iterable[_Union[RunOverview, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., runs_by_state: _Optional[_Mapping[str, int]] = ..., clients_by_state: _Optional[_Mapping[str, int]] = ..., history_number: _Optional[int] = ..., version: _Optional[str] = ..., now: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., runs_found: _Optional[int] = ..., attention: _Optional[_Iterable[_Union[ClientInNeed, _Mapping]]] = ..., leadership: _Optional[_Union[Leadership, _Mapping]] = ...) -> None: ...

class Leadership(_message.Message):
    __slots__ = ("leader", "epoch", "since", "standbys")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    leader: str
    epoch: int
    since: _timestamp_pb2.Timestamp
    standbys: _containers.RepeatedCompositeFieldContainer[Standby]
    def __init__(self, leader: _Optional[str] = ..., epoch: _Optional[int] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., standbys: _Optional[_Iterable[_Union[Standby, _Mapping]]] = ...) -> None: ...

class Standby(_message.Message):
    __slots__ = ("name", "since", "behind_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    BEHIND_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    since: _timestamp_pb2.Timestamp
    behind_bytes: int
    def __init__(self, name: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., behind_bytes: _Optional[int] = ...) -> None: ...

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoAmIResponse(_message.Message):
    __slots__ = ("identity", "roles", "source", "ends", "methods", "leadership")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    LEADERSHIP_FIELD_NUMBER: _ClassVar[int]
    identity: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    source: str
    ends: _timestamp_pb2.Timestamp
    methods: _containers.RepeatedScalarFieldContainer[str]
    leadership: Leadership
    def __init__(self, identity: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., source: _Optional[str] = ..., ends: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., methods: _Optional[_Iterable[str]] = ..., leadership: _Optional[_Union[Leadership, _Mapping]] = ...) -> None: ...

class CreateWebLinkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateWebLinkResponse(_message.Message):
    __slots__ = ("url", "expires")
    URL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    url: str
    expires: _timestamp_pb2.Timestamp
    def __init__(self, url: _Optional[str] = ..., expires: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class EnrollmentSpec(_message.Message):
    __slots__ = ("name", "name_prefix", "uses", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    name_prefix: str
    uses: int
    labels: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., name_prefix: _Optional[str] = ..., uses: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EnrollmentToken(_message.Message):
    __slots__ = ("id", "spec", "created", "expires", "actor", "state", "uses_left")
    ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    USES_LEFT_FIELD_NUMBER: _ClassVar[int]
    id: str
    spec: EnrollmentSpec
    created: _timestamp_pb2.Timestamp
    expires: _timestamp_pb2.Timestamp
    actor: str
    state: str
    uses_left: int
    def __init__(self, id: _Optional[str] = ..., spec: _Optional[_Union[EnrollmentSpec, _Mapping]] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., actor: _Optional[str] = ..., state: _Optional[str] = ..., uses_left: _Optional[int] = ...) -> None: ...

class CreateEnrollmentsRequest(_message.Message):
    __slots__ = ("specs", "ttl_s")
    SPECS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    specs: _containers.RepeatedCompositeFieldContainer[EnrollmentSpec]
    ttl_s: float
    def __init__(self, specs: _Optional[_Iterable[_Union[EnrollmentSpec, _Mapping]]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class CreatedEnrollment(_message.Message):
    __slots__ = ("enrollment", "token")
    ENROLLMENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    enrollment: EnrollmentToken
    token: str
    def __init__(self, enrollment: _Optional[_Union[EnrollmentToken, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class CreateEnrollmentsResponse(_message.Message):
    __slots__ = ("created", "ca_fingerprint", "enroll_address", "client_address")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CA_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ENROLL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    created: _containers.RepeatedCompositeFieldContainer[CreatedEnrollment]
    ca_fingerprint: str
    enroll_address: str
    client_address: str
    def __init__(self, created: _Optional[_Iterable[_Union[CreatedEnrollment, _Mapping]]] = ..., ca_fingerprint: _Optional[str] = ..., enroll_address: _Optional[str] = ..., client_address: _Optional[str] = ...) -> None: ...

class ListEnrollmentsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListEnrollmentsResponse(_message.Message):
    __slots__ = ("enrollments", "next_page_token")
    ENROLLMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    enrollments: _containers.RepeatedCompositeFieldContainer[EnrollmentToken]
    next_page_token: str
    def __init__(self, enrollments: _Optional[_Iterable[_Union[EnrollmentToken, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RevokeEnrollmentRequest(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RevokeEnrollmentResponse(_message.Message):
    __slots__ = ("enrollment",)
    ENROLLMENT_FIELD_NUMBER: _ClassVar[int]
    enrollment: EnrollmentToken
    def __init__(self, enrollment: _Optional[_Union[EnrollmentToken, _Mapping]] = ...) -> None: ...

class CertificateStatus(_message.Message):
    __slots__ = ("serial", "role", "name", "key", "issued", "not_after", "revoked", "reason")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    serial: str
    role: str
    name: str
    key: str
    issued: _timestamp_pb2.Timestamp
    not_after: _timestamp_pb2.Timestamp
    revoked: _timestamp_pb2.Timestamp
    reason: str
    def __init__(self, serial: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., key: _Optional[str] = ..., issued: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., not_after: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoked: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ListCertificatesRequest(_message.Message):
    __slots__ = ("name", "page_size", "page_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_size: int
    page_token: str
    def __init__(self, name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCertificatesResponse(_message.Message):
    __slots__ = ("certificates", "next_page_token")
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    certificates: _containers.RepeatedCompositeFieldContainer[CertificateStatus]
    next_page_token: str
    def __init__(self, certificates: _Optional[_Iterable[_Union[CertificateStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RevokeCertificatesRequest(_message.Message):
    __slots__ = ("name", "serial", "key", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    serial: str
    key: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., serial: _Optional[str] = ..., key: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RevokeCertificatesResponse(_message.Message):
    __slots__ = ("revoked",)
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    revoked: _containers.RepeatedCompositeFieldContainer[CertificateStatus]
    def __init__(self, revoked: _Optional[_Iterable[_Union[CertificateStatus, _Mapping]]] = ...) -> None: ...

class Authority(_message.Message):
    __slots__ = ("fingerprint", "name", "not_after", "accepted", "given", "signs", "signed_coordinator", "holders", "dependents", "dependent_names", "strangers", "stranger_names")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    SIGNED_COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    DEPENDENTS_FIELD_NUMBER: _ClassVar[int]
    DEPENDENT_NAMES_FIELD_NUMBER: _ClassVar[int]
    STRANGERS_FIELD_NUMBER: _ClassVar[int]
    STRANGER_NAMES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    name: str
    not_after: _timestamp_pb2.Timestamp
    accepted: bool
    given: bool
    signs: bool
    signed_coordinator: bool
    holders: int
    dependents: int
    dependent_names: _containers.RepeatedScalarFieldContainer[str]
    strangers: int
    stranger_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fingerprint: _Optional[str] = ..., name: _Optional[str] = ..., not_after: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., accepted: _Optional[bool] = ..., given: _Optional[bool] = ..., signs: _Optional[bool] = ..., signed_coordinator: _Optional[bool] = ..., holders: _Optional[int] = ..., dependents: _Optional[int] = ..., dependent_names: _Optional[_Iterable[str]] = ..., strangers: _Optional[int] = ..., stranger_names: _Optional[_Iterable[str]] = ...) -> None: ...

class ListAuthoritiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAuthoritiesResponse(_message.Message):
    __slots__ = ("authorities", "clients")
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    authorities: _containers.RepeatedCompositeFieldContainer[Authority]
    clients: int
    def __init__(self, authorities: _Optional[_Iterable[_Union[Authority, _Mapping]]] = ..., clients: _Optional[int] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("number", "time", "actor", "address", "method", "subject", "result", "detail", "hash")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: _timestamp_pb2.Timestamp
    actor: str
    address: str
    method: str
    subject: str
    result: str
    detail: str
    hash: bytes
    def __init__(self, number: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., actor: _Optional[str] = ..., address: _Optional[str] = ..., method: _Optional[str] = ..., subject: _Optional[str] = ..., result: _Optional[str] = ..., detail: _Optional[str] = ..., hash: _Optional[bytes] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("first", "actor", "method", "subject", "page_size", "page_token", "result", "since", "limit")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    first: int
    actor: str
    method: str
    subject: str
    page_size: int
    page_token: str
    result: str
    since: _timestamp_pb2.Timestamp
    limit: int
    def __init__(self, first: _Optional[int] = ..., actor: _Optional[str] = ..., method: _Optional[str] = ..., subject: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., result: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("entries", "next_page_token", "head_number", "head_hash")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HEAD_NUMBER_FIELD_NUMBER: _ClassVar[int]
    HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    next_page_token: str
    head_number: int
    head_hash: bytes
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., head_number: _Optional[int] = ..., head_hash: _Optional[bytes] = ...) -> None: ...

class ReleaseRules(_message.Message):
    __slots__ = ("stages", "advance_after_s", "most_failed", "metric", "most_drop", "lower_is_better", "most_rise")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    MOST_FAILED_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    MOST_DROP_FIELD_NUMBER: _ClassVar[int]
    LOWER_IS_BETTER_FIELD_NUMBER: _ClassVar[int]
    MOST_RISE_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedScalarFieldContainer[float]
    advance_after_s: float
    most_failed: float
    metric: str
    most_drop: float
    lower_is_better: bool
    most_rise: float
    def __init__(self, stages: _Optional[_Iterable[float]] = ..., advance_after_s: _Optional[float] = ..., most_failed: _Optional[float] = ..., metric: _Optional[str] = ..., most_drop: _Optional[float] = ..., lower_is_better: _Optional[bool] = ..., most_rise: _Optional[float] = ...) -> None: ...

class PackageWork(_message.Message):
    __slots__ = ("ended", "failed")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ended: int
    failed: int
    def __init__(self, ended: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class PackageFacts(_message.Message):
    __slots__ = ("version", "digest", "wheels", "work", "work_before")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WHEELS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    WORK_BEFORE_FIELD_NUMBER: _ClassVar[int]
    version: str
    digest: str
    wheels: _containers.RepeatedScalarFieldContainer[str]
    work: PackageWork
    work_before: PackageWork
    def __init__(self, version: _Optional[str] = ..., digest: _Optional[str] = ..., wheels: _Optional[_Iterable[str]] = ..., work: _Optional[_Union[PackageWork, _Mapping]] = ..., work_before: _Optional[_Union[PackageWork, _Mapping]] = ...) -> None: ...

class ReleaseStatus(_message.Message):
    __slots__ = ("model", "version", "state", "reason", "run_id", "round", "form", "labels", "signer", "digest", "size_bytes", "owner", "created", "rules", "share", "stage_began", "devices", "fell", "metric_before", "metric_now", "kind", "package")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class DevicesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    STAGE_BEGAN_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    FELL_FIELD_NUMBER: _ClassVar[int]
    METRIC_BEFORE_FIELD_NUMBER: _ClassVar[int]
    METRIC_NOW_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    state: str
    reason: str
    run_id: str
    round: int
    form: str
    labels: _containers.ScalarMap[str, str]
    signer: str
    digest: str
    size_bytes: int
    owner: str
    created: _timestamp_pb2.Timestamp
    rules: ReleaseRules
    share: float
    stage_began: _timestamp_pb2.Timestamp
    devices: _containers.ScalarMap[str, int]
    fell: int
    metric_before: float
    metric_now: float
    kind: str
    package: PackageFacts
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., run_id: _Optional[str] = ..., round: _Optional[int] = ..., form: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., signer: _Optional[str] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., owner: _Optional[str] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rules: _Optional[_Union[ReleaseRules, _Mapping]] = ..., share: _Optional[float] = ..., stage_began: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., devices: _Optional[_Mapping[str, int]] = ..., fell: _Optional[int] = ..., metric_before: _Optional[float] = ..., metric_now: _Optional[float] = ..., kind: _Optional[str] = ..., package: _Optional[_Union[PackageFacts, _Mapping]] = ...) -> None: ...

class ReleaseDevice(_message.Message):
    __slots__ = ("client_id", "state", "detail", "num_examples", "metrics", "metrics_before", "reported", "fell")
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
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    METRICS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    FELL_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    state: str
    detail: str
    num_examples: int
    metrics: _containers.ScalarMap[str, float]
    metrics_before: _containers.ScalarMap[str, float]
    reported: _timestamp_pb2.Timestamp
    fell: bool
    def __init__(self, client_id: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., num_examples: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., metrics_before: _Optional[_Mapping[str, float]] = ..., reported: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., fell: _Optional[bool] = ...) -> None: ...

class CreateReleaseRequest(_message.Message):
    __slots__ = ("description", "signature", "signer", "rules")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    signature: bytes
    signer: str
    rules: ReleaseRules
    def __init__(self, description: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., signer: _Optional[str] = ..., rules: _Optional[_Union[ReleaseRules, _Mapping]] = ...) -> None: ...

class CreateReleaseResponse(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: ReleaseStatus
    def __init__(self, release: _Optional[_Union[ReleaseStatus, _Mapping]] = ...) -> None: ...

class ListReleasesRequest(_message.Message):
    __slots__ = ("model", "page_size", "page_token", "kind")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    model: str
    page_size: int
    page_token: str
    kind: str
    def __init__(self, model: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class ListReleasesResponse(_message.Message):
    __slots__ = ("releases", "next_page_token")
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    releases: _containers.RepeatedCompositeFieldContainer[ReleaseStatus]
    next_page_token: str
    def __init__(self, releases: _Optional[_Iterable[_Union[ReleaseStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetReleaseRequest(_message.Message):
    __slots__ = ("model", "version", "page_size", "page_token", "kind")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    page_size: int
    page_token: str
    kind: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class GetReleaseResponse(_message.Message):
    __slots__ = ("release", "devices", "next_page_token")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    release: ReleaseStatus
    devices: _containers.RepeatedCompositeFieldContainer[ReleaseDevice]
    next_page_token: str
    def __init__(self, release: _Optional[_Union[ReleaseStatus, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[ReleaseDevice, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AdvanceReleaseRequest(_message.Message):
    __slots__ = ("model", "share", "kind")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    model: str
    share: float
    kind: str
    def __init__(self, model: _Optional[str] = ..., share: _Optional[float] = ..., kind: _Optional[str] = ...) -> None: ...

class AdvanceReleaseResponse(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: ReleaseStatus
    def __init__(self, release: _Optional[_Union[ReleaseStatus, _Mapping]] = ...) -> None: ...

class RollBackReleaseRequest(_message.Message):
    __slots__ = ("model", "version", "reason", "kind")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    reason: str
    kind: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class RollBackReleaseResponse(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: ReleaseStatus
    def __init__(self, release: _Optional[_Union[ReleaseStatus, _Mapping]] = ...) -> None: ...

class AddPackageRequest(_message.Message):
    __slots__ = ("digest", "rules")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    digest: _tensor_pb2.Digest
    rules: ReleaseRules
    def __init__(self, digest: _Optional[_Union[_tensor_pb2.Digest, _Mapping]] = ..., rules: _Optional[_Union[ReleaseRules, _Mapping]] = ...) -> None: ...

class AddPackageResponse(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: ReleaseStatus
    def __init__(self, release: _Optional[_Union[ReleaseStatus, _Mapping]] = ...) -> None: ...
