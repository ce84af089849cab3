"""A run's configuration: defaults, refusals in words, and the way over the wire and back."""

from __future__ import annotations

import pytest

from fl_server.errors import InvalidInput
from fl_server.run_config import RunConfig, from_spec, from_values, to_spec
from protos.fl.v1 import admin_pb2

TASK = {"name": "digits"}


def config(**values):
    """A run of digits with these values."""
    return from_values({"task": TASK, **values})


def test_defaults():
    """A task alone is a run: FedCM, two clients a round, one epoch, a hundred rounds."""
    run = config()
    assert (run.algorithm.name, run.algorithm.parameters) == ("fedcm", {})
    assert (run.local.learning_rate, run.local.epochs, run.local.steps, run.local.batch_size) == (0.1, 1, None, 32)
    assert (run.round.sampling, run.round.clients_per_round, run.round.close) == ("fixed", 2, "cohort")
    assert (run.stop.rounds, run.stop.metric, run.stop.target, run.stop.patience) == (100, "accuracy", None, 0)
    assert (run.evaluation.every, run.seed, run.labels, run.keep_checkpoints) == (1, 0, {}, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": {}}, "task.name: expected a value, got"),
        ({"task": {"name": ""}}, "task.name: expected String should have at least 1 character, got ''"),
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
        ({"local": {"batch_size": 1.5}}, "local.batch_size: expected a valid integer, got"),
        ({"round": {"sampling": "all"}}, "round.sampling: expected 'fixed' or 'bernoulli', got 'all'"),
        ({"round": {"close": "late"}}, "round.close: expected 'cohort' or 'goal', got 'late'"),
        ({"round": {"rate": 0}}, "round.rate: expected greater than 0, got 0"),
        ({"round": {"over_selection": 0.9}}, "round.over_selection: expected greater than or equal to 1, got 0.9"),
        ({"round": {"quorum": 3}}, "round: expected quorum to be at most clients_per_round .2., got 3"),
        ({"round": {"min_clients": 1}}, "round: expected min_clients to be at least clients_per_round .2., got 1"),
        ({"round": {"max_relative_norm": 0.5}}, "round: expected max_relative_norm to be 0 or at least 1, .* got 0.5"),
        (
            {"round": {"over_relative_norm": "keep"}},
            "round.over_relative_norm: expected 'refuse' or 'clip', got",
        ),
        ({"round": {"reducer": "mode"}}, "round.reducer: expected 'mean', 'median', 'trimmed_mean' or 'krum', got"),
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
            {"stop": {"target": 0.9}, "evaluation": {"every": 0}},
            "run: expected evaluation.every over 0 with stop.target",
        ),
        (
            {"stop": {"patience": 1}, "evaluation": {"every": 0}},
            "run: expected evaluation.every over 0 with stop.target",
        ),
        ({"seed": -1}, "seed: expected greater than or equal to 0, got -1"),
        ({"seed": 2**64}, "seed: expected less than 18446744073709551616, got"),
        ({"labels": {"site": 3}}, "labels.site: expected a valid string, got 3"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected greater than or equal to 1, got 0"),
    ],
)
def test_refusals_name_the_field(values, words):
    """The path of the field, what was expected, and what came."""
    with pytest.raises(InvalidInput, match=f"^{words}"):
        config(**values)


def test_a_long_value_is_shown_short():
    """An error is a line, not a page."""
    with pytest.raises(InvalidInput) as error:
        config(seed="x" * 1000)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["", "a", "my-run_2.1", "_x", "0", "a" * 64])
def test_names_that_can_be_ids(name):
    """Lower-case letters, digits, dots, dashes and underscores; empty is made up later."""
    assert config(name=name).name == name


@pytest.mark.parametrize("name", ["A", "a b", "-x", ".", "..", ".x", "a/b", "a" * 65, "a\n", "é"])
def test_names_that_cannot_be_ids(name):
    """Nothing that a command would take for an option, a file system for a place, or a terminal for two lines."""
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
def test_the_id_a_run_gets(task, name, base):
    """Its name; else task and algorithm, in characters of an id, with room for a number behind them."""
    run = from_values({"task": {"name": task}, "name": name})
    assert run.base_id() == base
    assert config(name=base).name == base


FULL = {
    "name": "all",
    "task": {"name": "m:T", "options": {"depth": 3, "rate": 0.5, "wide": True, "words": ["a", 2]}},
    "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.25, "weights": "examples"}},
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
def test_over_the_wire_and_back(values):
    """A run comes back as it was, with every default filled in; so does one from the store's plain values."""
    run = from_values(values)
    spec = admin_pb2.RunSpec.FromString(to_spec(run).SerializeToString())
    assert from_spec(spec) == run
    assert from_values(run.model_dump(exclude_none=True)) == run
    assert spec.stop.rounds == run.stop.rounds


def test_a_robust_round_over_the_wire_and_back():
    """Every key of it."""
    krum = {"clients_per_round": 9, "quorum": 8, "reducer": "krum", "krum_byzantine": 2, "krum_keep": 4, "trim": 0.1}
    run = config(round={**krum, "max_relative_norm": 3.0, "over_relative_norm": "clip"})
    assert from_spec(admin_pb2.RunSpec.FromString(to_spec(run).SerializeToString())) == run


def test_a_target_of_zero_is_a_target():
    """On the wire too, where zero is no absence."""
    run = config(stop={"metric": "loss", "target": 0.0})
    assert from_spec(to_spec(run)).stop.target == 0.0
    assert from_spec(to_spec(config())).stop.target is None


def test_whole_numbers_of_options_are_whole_again():
    """The wire knows one kind of number: 3 comes back as 3 and not as 3.0, inside lists and tables too."""
    options = {"depth": 3, "sizes": [1, 2.5], "table": {"n": 4}, "flag": True}
    run = from_spec(to_spec(config(task={"name": "m:T", "options": options})))
    assert run.task.options == options
    assert [type(run.task.options[key]) for key in ("depth", "flag")] == [int, bool]


def test_the_learning_rate_decays_by_round():
    """0.5 * 0.5^2 = 0.125."""
    local = config(local={"learning_rate": 0.5, "learning_rate_decay": 0.5}).local
    assert [local.learning_rate_in(round_) for round_ in (0, 1, 2)] == [0.5, 0.25, 0.125]


def test_the_policy_of_the_rounds():
    """Half of the cohort, rounded up, is a quorum; stop rules that look at metrics wait for evaluations."""
    policy = config(round={"clients_per_round": 5, "deadline_s": 7}, seed=3).policy()
    assert (policy.seed, policy.min_clients, policy.quorum, policy.deadline_s) == (3, 5, 3, 7.0)
    assert (policy.evaluate_every, policy.await_evaluation) == (1, False)
    assert config(stop={"target": 0.5}).policy().await_evaluation
    assert config(stop={"patience": 1}).policy().await_evaluation
    given = config(round={"clients_per_round": 5, "quorum": 5, "min_clients": 9}).policy()
    assert (given.quorum, given.min_clients) == (5, 9)


def test_a_stop_rule_may_look_at_what_clients_find():
    """Then the next round awaits them and not the server, and their evaluation must be on."""
    stop = {"metric": "clients_accuracy_mean", "target": 0.5}
    policy = config(stop=stop, evaluation={"clients_every": 2, "every": 0}).policy()
    assert (policy.ask_clients_every, policy.await_clients, policy.await_evaluation) == (2, True, False)
    with pytest.raises(InvalidInput, match=r"evaluation\.clients_every over 0"):
        config(stop=stop)


def test_a_configuration_cannot_be_changed():
    """What was checked stays what it is."""
    with pytest.raises(ValueError, match="frozen"):
        RunConfig(task=TASK).seed = 3


def test_a_refusal_keeps_nothing_of_what_was_refused():
    """Pydantic's error would keep it for ever: the garbage collector does not see what that holds."""
    with pytest.raises(InvalidInput) as refused:
        from_values({"task": {"name": "digits", "options": {"a": float("inf")}}})
    assert refused.value.__context__ is None
