"""A run's configuration: the fields of RunSpec in admin.proto, with their defaults and limits.

RunSpec is the source of the names. A test compares it with the classes here, and a run's TOML file is read by its
descriptor. `spec.py` converts between the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from fl_common.names import VERSION_PATTERN
from fl_server.rounds.metrics import LOSS, Criterion, Directions, StopPolicy, by_clients, of_averaged
from fl_server.rounds.sampling import RoundPolicy
from fl_server.run_settings.privacy import (
    PrivacySection,
    SecureAggregationSection,
    without_relative_limits,
)
from fl_server.run_settings.sections import (
    MAX_COUNT,
    MAX_EXAMPLES,
    MAX_LABELS,
    MAX_NUMBER,
    MAX_PATTERNS,
    MAX_SCHEDULES,
    MAX_SECONDS,
    FileName,
    Fingerprint,
    LocalSection,
    Parameters,
    RoundSection,
    Section,
    Word,
    checked_plain,
)
from protos.encoding_spec import EDEN, SPARSE, Dense, Encoding
from protos.run_file import MOST_WHOLE


def _name(name: str) -> str:
    if not re.fullmatch(r"([a-z0-9_][a-z0-9._-]{0,63})?", name):
        raise ValueError("expected at most 64 of a-z 0-9 . _ - that do not start with . or -")
    return name


def _version(text: str) -> str:
    if text and not VERSION_PATTERN.fullmatch(text):
        raise ValueError("expected a version such as 0.2 or 0.2.1")
    return text


def _owner(name: str) -> str:
    if not re.fullmatch(r"[!-~]{1,160}", name):
        raise ValueError("expected the name of an operator, 1 to 160 visible ASCII characters")
    return name


def _with_whole_numbers(value: Any) -> Any:
    """The wire has one kind of number: 62 in a file arrives as 62.0, and becomes 62 again."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MOST_WHOLE
    return int(value) if is_whole else value


Options = Annotated[dict[str, Any], BeforeValidator(_with_whole_numbers), BeforeValidator(checked_plain)]
"""A task's options, which are checked first."""


class TaskSection(Section):
    """The task of the run."""

    name: Word = Field(min_length=1)
    options: Options = Field(default={})
    frozen: Literal["send", "local"] = "send"
    package: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""


class ScheduleSection(Section):
    """How a parameter changes from round to round. `algorithms.Schedule` checks the values."""

    kind: Word
    end: float | None = None
    milestones: tuple[Annotated[int, Field(ge=0, le=MAX_COUNT)], ...] = ()
    factor: float | None = Field(default=None, gt=0, le=MAX_NUMBER)


class AlgorithmSection(Section):
    """The method and its parameters."""

    name: Word = "fedcm"
    parameters: Parameters = Field(default={})
    schedules: dict[Word, ScheduleSection] = Field(default={}, max_length=MAX_SCHEDULES)
    fingerprint: Fingerprint | None = None


class StopSection(Section):
    """The stop rules."""

    rounds: int = Field(default=100, ge=1, le=MAX_COUNT)
    metric: Annotated[Word, Field(min_length=1)] = LOSS
    lower_is_better: bool | None = None
    target: float | None = None
    patience: int = Field(default=0, ge=0, le=MAX_COUNT)
    wall_time_s: float = Field(default=0.0, ge=0, le=MAX_SECONDS)

    @model_validator(mode="after")
    def _target_of_a_metric(self) -> Self:
        if self.target is not None and "metric" not in self.model_fields_set:
            raise ValueError("expected stop.metric with stop.target: the metric that is to reach it")
        return self

    @property
    def criterion(self) -> Criterion:
        """The metric that selects the best round. A run that was created has its direction."""
        known = self.lower_is_better
        return Criterion(self.metric, bool(Directions().lower_is_better(self.metric) if known is None else known))

    @property
    def policy(self) -> StopPolicy:
        """The stop rules by the metric."""
        return StopPolicy(self.criterion, self.target, self.patience)


_OF_ROUNDS = [field.name for field in fields(RoundPolicy) if field.name in RoundSection.model_fields]
"""What the section and the policy of rounds have in common."""


class EvaluationSection(Section):
    """How often the model is evaluated, by the server and by clients."""

    every: int = Field(default=1, ge=0, le=MAX_COUNT)
    batch_size: int = Field(default=0, ge=0, le=MAX_COUNT)
    clients_every: int = Field(default=0, ge=0, le=MAX_COUNT)
    clients: int = Field(default=0, ge=0, le=MAX_COUNT)
    clients_deadline_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    averaged_on_clients: bool = False


class EncodingsSection(Section):
    """How updates, the model and the direction travel."""

    update: Encoding = "plain"
    model: Dense = "plain"
    direction: Dense = "plain"
    fraction: float | None = Field(default=None, gt=0, le=1)
    reference: Literal["none", "direction"] = "none"
    difference: Literal["none", "previous"] = "none"

    @field_validator("model", "direction", mode="before")
    @classmethod
    def _whole(cls, name: Any) -> Any:
        if name in SPARSE:
            raise ValueError("expected an encoding that keeps every value: a client would train from a model with gaps")
        return name

    @model_validator(mode="after")
    def _fraction_of_sparse(self) -> Self:
        if self.update in SPARSE and self.fraction is None:
            raise ValueError(f'expected encodings.fraction, over 0 and at most 1, with update = "{self.update}"')
        if self.update not in SPARSE and self.fraction is not None:
            raise ValueError(f'expected encodings.fraction only with update = "topk" or "randk", got "{self.update}"')
        return self

    @model_validator(mode="after")
    def _difference_of_near_models(self) -> Self:
        if self.difference == "previous" and self.model in EDEN:
            raise ValueError(
                f'expected encodings.difference = "none" with model = "{self.model}", got "previous": EDEN rotates two '
                "successive models by other signs, so their difference is as large as a model"
            )
        return self

    @property
    def sparse(self) -> bool:
        """Whether clients keep what their updates leave out, for the next one."""
        return self.update in SPARSE

    @property
    def plain_down(self) -> bool:
        """Whether everything that clients get is without an encoding."""
        return self.model == self.direction == "plain"

    @property
    def needed(self) -> frozenset[str]:
        """The encodings that a client must know."""
        return frozenset({self.update, self.model, self.direction}) - {"plain"}


class AveragingSection(Section):
    """The averaged model, which is evaluated and exported beside the latest one."""

    method: Literal["ema", "tail", "window"]
    decay: float | None = Field(default=None, gt=0, lt=1)
    start: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    window: int | None = Field(default=None, ge=2, le=MAX_COUNT)
    statistics: Literal["averaged", "estimated"] = "averaged"

    @model_validator(mode="after")
    def _the_key_of_its_method(self) -> Self:
        wanted = {"ema": "decay", "tail": "start", "window": "window"}
        for method, key in wanted.items():
            given = getattr(self, key) is not None
            if given != (self.method == method):
                raise ValueError(
                    f'expected averaging.{key} with method = "{method}" and only there, got method = "{self.method}"'
                    f" {'with' if given else 'without'} {key}"
                )
        return self


PRESETS: Mapping[str, dict[str, Any]] = {
    "diloco": {"optimizer": {"name": "adamw", "state": "device"}, "continue_data": True},
}
"""Defaults of the section local by the method's name."""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run, with the method's defaults of the section local in place of the usual ones."""
    algorithm, local = values.get("algorithm"), values.get("local", {})
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else getattr(algorithm, "name", None)
    if not isinstance(name, str) or name not in PRESETS or not isinstance(local, dict):
        return dict(values)
    return {**values, "local": PRESETS[name] | local}


class RunConfig(Section):
    """The configuration of a run."""

    name: Annotated[str, AfterValidator(_name)] = ""
    task: TaskSection
    algorithm: AlgorithmSection = AlgorithmSection()
    local: LocalSection = LocalSection()
    round: RoundSection = RoundSection()
    stop: StopSection = StopSection()
    evaluation: EvaluationSection = EvaluationSection()
    encodings: EncodingsSection = EncodingsSection()
    seed: int = Field(default=0, ge=0, lt=2**64)
    labels: dict[Word, Word] = Field(default={}, max_length=MAX_LABELS)
    min_client_version: Annotated[str, AfterValidator(_version)] = ""
    population: int = Field(default=0, ge=0, le=MAX_COUNT)
    population_examples: int = Field(default=0, ge=0, le=MAX_EXAMPLES)
    planned_rounds: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    initial_model: FileName = ""
    keep_checkpoints: int = Field(default=2, ge=1, le=MAX_COUNT)
    owner: Annotated[str, AfterValidator(_owner)] | None = None
    personal: tuple[Annotated[Word, Field(min_length=1)], ...] = Field(default=(), max_length=MAX_PATTERNS)
    averaging: AveragingSection | None = None
    privacy: PrivacySection | None = None
    secure_aggregation: SecureAggregationSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_others(cls, values: Any) -> Any:
        """Sections whose defaults depend on another one."""
        if not isinstance(values, dict):
            return values
        return without_relative_limits(with_preset(values))

    @model_validator(mode="after")
    def _metric_rules_need_evaluations(self) -> Self:
        key = "clients_every" if by_clients(self.stop.metric) else "every"
        if self.stops_by_metric and not getattr(self.evaluation, key):
            raise ValueError(f"expected evaluation.{key} over 0 with stop.target or stop.patience, got 0")
        return self

    @model_validator(mode="after")
    def _averaged_model_is_made(self) -> Self:
        averaging, metric = self.averaging, self.stop.metric
        if averaging is None and of_averaged(metric):
            raise ValueError(f"expected the section averaging with stop.metric = {metric!r}, got none")
        on_clients = self.evaluation.averaged_on_clients
        if on_clients and (averaging is None or not self.evaluation.clients_every):
            raise ValueError(
                "expected the section averaging and evaluation.clients_every with evaluation.averaged_on_clients, got"
                f" {'clients_every = 0' if averaging else 'no section averaging'}"
            )
        if of_averaged(metric) and by_clients(metric) and not on_clients:
            raise ValueError(f"expected evaluation.averaged_on_clients with stop.metric = {metric!r}, got none")
        if averaging is not None and averaging.start is not None and averaging.start >= self.stop.rounds:
            raise ValueError(
                f"expected averaging.start under stop.rounds ({self.stop.rounds}), got {averaging.start}: the run would"
                " end without an averaged model"
            )
        return self

    @property
    def client_privacy(self) -> PrivacySection | None:
        """The section privacy if it protects whole clients, by noise of the coordinator."""
        return self.privacy if self.privacy is not None and self.privacy.unit == "client" else None

    @property
    def hides_cohorts(self) -> bool:
        """Whether nobody but the account is told who, and how many, take part in a round: the draws are secret."""
        return self.client_privacy is not None

    @property
    def record_privacy(self) -> PrivacySection | None:
        """The section privacy if it protects single examples, by noise of the devices."""
        return self.privacy if self.privacy is not None and self.privacy.unit == "record" else None

    @property
    def stops_by_metric(self) -> bool:
        """Whether an evaluation can end the run."""
        return self.stop.policy.uses_metrics

    @property
    def horizon(self) -> int:
        """T, the number of rounds for which schedules are planned."""
        return self.planned_rounds or self.stop.rounds

    def policy(self, exchanges: int = 1, population: int = 0) -> RoundPolicy:
        """The policy of the round state machine. The algorithm determines `exchanges` and `population`."""
        section = self.round
        fixed = section.sampling == "fixed"
        own = {name: getattr(section, name) for name in _OF_ROUNDS}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None} | {
            "min_clients": section.min_clients
            or section.goal
            or (section.clients_per_round if fixed else section.least),
            "quorum": section.fewest if fixed else section.quorum or 0,
            "min_accepted": section.least,
        }
        if self.client_privacy is not None and self.secure_aggregation is None:
            given |= {"private": True, "quorum": 0, "min_accepted": 0}
        if (secure := self.secure_aggregation) is not None:
            quorum = max(section.fewest, self.least)
            given |= {"secure": True, "on_drop": secure.on_drop, "stage_s": secure.stage_s}
            given |= {"quorum": quorum, "min_accepted": self.least, "tells_clients": not self.hides_cohorts}
        return RoundPolicy(
            **given,
            seed=self.seed,
            exchanges=exchanges,
            population=population,
            evaluate_every=self.evaluation.every,
            await_evaluation=self.stops_by_metric and not by_clients(self.stop.metric),
            ask_clients_every=self.ask_clients_every,
            await_clients=self.stops_by_metric and by_clients(self.stop.metric),
            stop=self.stop.policy,
        )

    @property
    def rate_of_clients(self) -> float:
        """q of a run with client-level privacy: the largest probability with which a client is drawn for a round.

        A cohort of a fixed size is drawn of `min_clients` at least.
        """
        round_ = self.round
        if round_.sampling == "bernoulli":
            return round_.rate
        return round_.clients_per_round / max(round_.clients_per_round, round_.min_clients or 0)

    @property
    def ask_clients_every(self) -> int:
        """After how many rounds clients are asked to evaluate; 0: never.

        With secure aggregation a round's own clients measure, and their sums come with those of the updates.
        """
        return 0 if self.secure_aggregation is not None else self.evaluation.clients_every

    @property
    def least(self) -> int:
        """Fewest updates that a model may be made of."""
        secure = self.secure_aggregation
        return max(self.round.least, 0 if secure is None else secure.min_clients)

    def base_id(self) -> str:
        """The id of the run, if it is free."""
        words = re.sub(r"[^a-z0-9._-]+", "-", f"{self.task.name}-{self.algorithm.name}".lower())
        return self.name or words.lstrip(".-")[:56]
