"""A run's configuration: its fields are those of RunSpec; defaults, refusals, and conversion to the wire and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import annotated_types
import pytest
from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_spec, from_values, to_spec
from protos.fl.v1 import admin_pb2

TASK = {"name": "digits"}


def config(**values: Any) -> RunConfig:
    """A run of digits with these values."""
    return from_values({"task": TASK, **values})


LARGEST = {FieldDescriptor.TYPE_UINT32: 2**32 - 1, FieldDescriptor.TYPE_UINT64: 2**64 - 1}


def fields_of(
    message: Any, model: type[BaseModel], path: str = ""
) -> Iterator[tuple[str, FieldDescriptor | None, FieldInfo | None]]:
    """(path, field of RunSpec, field of RunConfig) of every value; None where one of the two lacks the field."""
    for name in dict.fromkeys([*message.fields_by_name, *model.model_fields]):
        wire, here = message.fields_by_name.get(name), model.model_fields.get(name)
        section = None if here is None else section_of(here)
        if wire is not None and section is not None:
            of_map = wire.message_type.GetOptions().map_entry
            entry = wire.message_type.fields_by_name["value"] if of_map else wire
            yield from fields_of(entry.message_type, section, f"{path}{name}.")
        else:
            yield path + name, wire, here


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section, or of the entries of a list or table."""
    for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


FIELDS = list(fields_of(admin_pb2.RunSpec.DESCRIPTOR, RunConfig))


@pytest.mark.parametrize(("path", "wire", "here"), FIELDS, ids=[path for path, _, _ in FIELDS])
def test_the_configuration_has_the_fields_of_run_spec(
    path: str, wire: FieldDescriptor | None, here: FieldInfo | None
) -> None:
    """By name, and every accepted number fits the field of RunSpec."""
    assert wire is not None, f"{path} is in RunConfig and not in RunSpec"
    assert here is not None, f"{path} is in RunSpec and not in RunConfig"
    if wire.type in LARGEST:
        limits = here.annotation.__args__[0].__metadata__[0].metadata if wire.is_repeated else here.metadata  # type: ignore[union-attr]  # a tuple of numbers
        upper = [rule for rule in limits if isinstance(rule, annotated_types.Le | annotated_types.Lt)]
        assert len(upper) == 1
        rule = upper[0]
        largest = rule.le if isinstance(rule, annotated_types.Le) else rule.lt - 1  # type: ignore[operator]  # a number
        assert int(str(largest)) <= LARGEST[wire.type]


def test_a_spec_has_every_default_filled_in() -> None:
    """Operators see the values in effect, and a later version with other defaults does not change a run."""
    plain = to_spec(config(averaging={"method": "ema", "decay": 0.9}))
    secure = to_spec(config(secure_aggregation={"clip": 1.0}))  # other sections have other defaults then
    for path, wire, here in FIELDS:
        *sections, name = path.split(".")
        if wire is None or here is None or here.is_required() or here.default in (None, {}, ()) or len(sections) > 1:
            continue
        message: Any = secure if sections == ["secure_aggregation"] else plain
        for section in sections:
            message = getattr(message, section)
        assert not wire.has_presence or message.HasField(name), path
        value = getattr(message, name)
        assert (tuple(value) if isinstance(here.default, tuple) else value) == here.default, path


def test_defaults() -> None:
    """A task is enough for a run: FedCM, two clients a round, one epoch, a hundred rounds."""
    run = config()
    assert (run.algorithm.name, run.algorithm.parameters) == ("fedcm", {})
    assert (run.local.learning_rate, run.local.epochs, run.local.steps, run.local.batch_size) == (0.1, 1, None, 32)
    assert (run.round.sampling, run.round.clients_per_round, run.round.close) == ("fixed", 2, "cohort")
    assert (run.stop.rounds, run.stop.metric, run.stop.target, run.stop.patience) == (100, "loss", None, 0)
    assert (run.evaluation.every, run.seed, run.labels, run.keep_checkpoints) == (1, 0, {}, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": {}}, "task.name: expected a value, got"),
        ({"task": {"name": ""}}, "task.name: expected text of at least 1 characters, got ''"),
        ({"rounds": 3}, "rounds: expected no field of this name, got 3"),
        ({"local": {"lr": 0.1}}, "local.lr: expected no field of this name, got 0.1"),
        ({"local": {"learning_rate": 0}}, "local.learning_rate: expected greater than 0, got 0"),
        ({"local": {"learning_rate": float("nan")}}, "local.learning_rate: expected a finite number, got nan"),
        (
            {"local": {"learning_rate_decay": 1.5}},
            "local.learning_rate_decay: expected less than or equal to 1, got 1.5",
        ),
        ({"local": {"epochs": 1, "steps": 2}}, "local: expected epochs or steps, got both: remove one, got"),
        ({"local": {"epochs": 0}}, "local.epochs: expected greater than or equal to 1, got 0"),
        ({"local": {"steps": 0}}, "local.steps: expected greater than or equal to 1, got 0"),
        ({"local": {"batch_size": 1.5}}, "local.batch_size: expected a whole number, got"),
        ({"round": {"sampling": "all"}}, "round.sampling: expected 'fixed' or 'bernoulli', got 'all'"),
        ({"round": {"close": "late"}}, "round.close: expected 'cohort', 'goal' or 'buffer', got 'late'"),
        ({"round": {"rate": 0}}, "round.rate: expected greater than 0, got 0"),
        ({"round": {"over_selection": 0.9}}, "round.over_selection: expected greater than or equal to 1, got 0.9"),
        ({"round": {"quorum": 3}}, "round: expected quorum to be at most clients_per_round .2., got 3"),
        ({"round": {"min_clients": 1}}, "round: expected min_clients to be at least clients_per_round .2., got 1"),
        ({"round": {"max_relative_norm": 0.5}}, "round: expected max_relative_norm to be 0 or at least 1, .* got 0.5"),
        (
            {"round": {"over_relative_norm": "keep"}},
            "round.over_relative_norm: expected 'refuse' or 'clip', got",
        ),
        (
            {"round": {"reducer": "median", "clients_per_round": 6, "reducer_parameters": {"trim": 0.1}}},
            'round: expected no reducer_parameters with reducer = "median"',
        ),
        ({"round": {"trim": 0.5}}, "round.trim: expected less than 0.5, got 0.5"),
        ({"round": {"krum_byzantine": 0}}, "round.krum_byzantine: expected greater than or equal to 1, got 0"),
        (
            {"round": {"reducer": "median", "sampling": "bernoulli"}},
            'round: expected sampling = "fixed" with reducer = "median": a cohort may be too small',
        ),
        (
            {"round": {"reducer": "trimmed_mean", "clients_per_round": 4}},
            'round: expected quorum to be at least 3 with reducer = "trimmed_mean", got 2',
        ),
        (
            {"round": {"reducer": "krum", "krum_byzantine": 2, "clients_per_round": 12}},
            r'round: expected quorum to be at least 7 with reducer = "krum" .2 krum_byzantine . 3., got 6',
        ),
        (
            {"round": {"reducer": "krum", "krum_keep": 3, "clients_per_round": 10}},
            r"round: expected krum_keep to be at most quorum - krum_byzantine - 2 .2., got 3",
        ),
        ({"round": {"deadline_s": 0}}, "round.deadline_s: expected greater than 0, got 0"),
        ({"stop": {"rounds": 0}}, "stop.rounds: expected greater than or equal to 1, got 0"),
        (
            {"stop": {"metric": "f1", "target": 0.9}, "evaluation": {"every": 0}},
            "run: expected evaluation.every over 0 with stop.target",
        ),
        (
            {"stop": {"patience": 1}, "evaluation": {"every": 0}},
            "run: expected evaluation.every over 0 with stop.target",
        ),
        ({"name": "Wine"}, "name: expected at most 64 of a-z 0-9 . _ - that do not start with . or -, got 'Wine'"),
        ({"task": {"name": "x", "options": 3}}, "task.options: expected a table, got 3"),
        ({"seed": -1}, "seed: expected greater than or equal to 0, got -1"),
        ({"seed": 2**64}, "seed: expected less than 18446744073709551616, got"),
        ({"labels": {"site": 3}}, "labels.site: expected text, got 3"),
        ({"algorithm": {"schedules": {"alpha": {}}}}, "algorithm.schedules.alpha.kind: expected a value"),
        (
            {"algorithm": {"schedules": {"alpha": {"kind": "cosine", "ending": 1}}}},
            "algorithm.schedules.alpha.ending: expected no field of this name",
        ),
        (
            {"algorithm": {"schedules": {"alpha": {"kind": "step", "milestones": [-1], "factor": 0.5}}}},
            "algorithm.schedules.alpha.milestones.0: expected greater than or equal to 0, got -1",
        ),
        (
            {"algorithm": {"schedules": {f"p{i}": {"kind": "constant"} for i in range(17)}}},
            "algorithm.schedules: expected at most 16 entries, got ",
        ),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected greater than or equal to 1, got 0"),
    ],
)
def test_refusals_name_the_field(values: dict[str, Any], message: str) -> None:
    """The path of the field, the expected and the given value."""
    with pytest.raises(InvalidInput, match=f"^{message}"):
        config(**values)


def test_a_long_value_is_shortened_in_errors() -> None:
    """An error is one short line."""
    with pytest.raises(InvalidInput) as error:
        config(seed="x" * 1000)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["", "a", "my-run_2.1", "_x", "0", "a" * 64])
def test_valid_run_names(name: str) -> None:
    """Lower-case letters, digits, dots, dashes and underscores; for an empty name an id is made later."""
    assert config(name=name).name == name


@pytest.mark.parametrize("name", ["A", "a b", "-x", ".", "..", ".x", "a/b", "a" * 65, "a\n", "é"])
def test_invalid_run_names(name: str) -> None:
    """Names that look like an option, a path or two lines are refused."""
    with pytest.raises(InvalidInput, match="name: expected"):
        config(name=name)


@pytest.mark.parametrize(
    ("task", "name", "base"),
    [
        ("digits", "", "digits-fedcm"),
        ("digits", "mine", "mine"),
        ("My.Pkg:Wine", "", "my.pkg-wine-fedcm"),
        ("_x:Y", "", "_x-y-fedcm"),
        ("é:Y", "", "y-fedcm"),
        ("m:" + "X" * 90, "", "m-" + "x" * 54),
    ],
)
def test_the_id_of_a_run(task: str, name: str, base: str) -> None:
    """Its name; otherwise task and algorithm in valid characters, with space for a number after them."""
    run = from_values({"task": {"name": task}, "name": name})
    assert run.base_id() == base
    assert config(name=base).name == base


FULL = {
    "name": "all",
    "task": {"name": "m:T", "options": {"depth": 3, "rate": 0.5, "wide": True, "words": ["a", 2]}},
    "algorithm": {
        "name": "fedcm",
        "parameters": {"alpha": 0.25, "weights": "examples"},
        "schedules": {
            "alpha": {"kind": "cosine", "end": 1.0},
            "eta_g": {"kind": "step", "milestones": [3, 2**32 - 1], "factor": 0.5},
        },
    },
    "local": {"learning_rate": 0.3, "learning_rate_decay": 0.998, "steps": 7, "batch_size": 5, "weight_decay": 1e-4},
    "round": {"sampling": "bernoulli", "rate": 0.3, "close": "goal", "quorum": 9, "deadline_s": 0.5},
    "stop": {"rounds": 7, "metric": "loss", "target": 0.1, "patience": 2, "wall_time_s": 3.5},
    "evaluation": {"every": 2, "batch_size": 3},
    "seed": 2**64 - 1,
    "labels": {"site": "north"},
    "population": 8,
    "initial_model": "/x.safetensors",
    "keep_checkpoints": 5,
}


@pytest.mark.parametrize("values", [{"task": TASK}, FULL], ids=["least", "all"])
def test_over_the_wire_and_back(values: dict[str, Any]) -> None:
    """A run is equal after both conversions, with all defaults; also from the store's plain values."""
    run = from_values(values)
    spec = admin_pb2.RunSpec.FromString(to_spec(run).SerializeToString())
    assert from_spec(spec) == run
    assert from_values(run.model_dump(exclude_none=True)) == run
    assert spec.stop.rounds == run.stop.rounds


def test_a_robust_round_over_the_wire_and_back() -> None:
    """With every key of a robust round."""
    krum = {"clients_per_round": 9, "quorum": 8, "reducer": "krum", "krum_byzantine": 2, "krum_keep": 4, "trim": 0.1}
    run = config(round={**krum, "max_relative_norm": 3.0, "over_relative_norm": "clip"})
    assert from_spec(admin_pb2.RunSpec.FromString(to_spec(run).SerializeToString())) == run


def test_a_target_of_zero_is_a_target() -> None:
    """Also on the wire, where zero differs from absence."""
    run = config(stop={"metric": "loss", "target": 0.0})
    assert from_spec(to_spec(run)).stop.target == 0.0
    assert from_spec(to_spec(config())).stop.target is None


def test_integer_options_stay_integers() -> None:
    """The wire has only floats: 3 is read as 3 and not as 3.0, also inside lists and tables."""
    options = {"depth": 3, "sizes": [1, 2.5], "table": {"n": 4}, "flag": True}
    run = from_spec(to_spec(config(task={"name": "m:T", "options": options})))
    assert run.task.options == options
    assert [type(run.task.options[key]) for key in ("depth", "flag")] == [int, bool]


def test_the_learning_rate_decays_by_round() -> None:
    """0.5 * 0.5^2 = 0.125."""
    local = config(local={"learning_rate": 0.5, "learning_rate_decay": 0.5}).local
    assert [local.learning_rate_in(round_) for round_ in (0, 1, 2)] == [0.5, 0.25, 0.125]


def test_the_policy_of_the_rounds() -> None:
    """The default quorum is half of the cohort, rounded up; stop rules on metrics wait for evaluations."""
    policy = config(round={"clients_per_round": 5, "deadline_s": 7}, seed=3).policy()
    assert (policy.seed, policy.min_clients, policy.quorum, policy.deadline_s) == (3, 5, 3, 7.0)
    assert (policy.evaluate_every, policy.await_evaluation) == (1, False)
    assert config(stop={"metric": "accuracy", "target": 0.5}).policy().await_evaluation
    assert config(stop={"patience": 1}).policy().await_evaluation
    given = config(round={"clients_per_round": 5, "quorum": 5, "min_clients": 9}).policy()
    assert (given.quorum, given.min_clients) == (5, 9)


def test_a_stop_rule_can_use_a_metric_of_the_clients() -> None:
    """Then the next round waits for the clients and not for the server, and their evaluation must be on."""
    stop = {"metric": "clients_accuracy_mean", "target": 0.5}
    policy = config(stop=stop, evaluation={"clients_every": 2, "every": 0}).policy()
    assert (policy.ask_clients_every, policy.await_clients, policy.await_evaluation) == (2, True, False)
    with pytest.raises(InvalidInput, match=r"evaluation\.clients_every over 0"):
        config(stop=stop)


def test_a_configuration_cannot_be_changed() -> None:
    """Checked values cannot become invalid."""
    with pytest.raises(ValueError, match="frozen"):
        config().seed = 3


def test_a_refusal_keeps_no_reference_to_the_refused_value() -> None:
    """Pydantic's error would keep it in memory: the garbage collector does not see its references."""
    with pytest.raises(InvalidInput) as refused:
        from_values({"task": {"name": "digits", "options": {"a": float("inf")}}})
    assert refused.value.__context__ is None


@pytest.mark.parametrize(
    ("encodings", "message"),
    [
        ({"update": "zip"}, "encodings.update: expected 'plain', 'bf16', .* got 'zip'"),
        ({"model": "topk"}, "encodings.model: expected an encoding that keeps every value: .* got 'topk'"),
        ({"direction": "randk"}, "encodings.direction: expected an encoding that keeps every value: .* got 'randk'"),
        ({"update": "topk"}, 'encodings: expected encodings.fraction, over 0 .* with update = "topk"'),
        ({"update": "int8", "fraction": 0.1}, 'encodings: expected encodings.fraction only with .* got "int8"'),
        ({"update": "randk", "fraction": 0.0}, "encodings.fraction: expected .* got 0.0"),
        ({"difference": "first"}, "encodings.difference: expected 'none' or 'previous', got 'first'"),
        (
            {"difference": "previous", "model": "eden2"},
            'encodings: expected encodings.difference = "none" with model = "eden2", got "previous"',
        ),
    ],
)
def test_encodings_that_exclude_each_other_are_refused(encodings: dict[str, Any], message: str) -> None:
    """With the field, what was expected, and what came."""
    with pytest.raises(InvalidInput, match=message):
        config(encodings=encodings)


def test_the_needed_encodings_are_those_that_are_not_plain() -> None:
    """By name, and the same after the wire."""
    run = config(encodings={"update": "topk", "fraction": 0.25, "model": "bf16", "difference": "previous"})
    assert run.encodings.needed == {"topk", "bf16"}
    assert not config().encodings.needed
    assert from_spec(to_spec(run)).encodings == run.encodings
