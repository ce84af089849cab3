"""What a run with secure aggregation excludes: each setting is refused by its name, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from fl_server.aggregation.methods import build_algorithm
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_values

RUN: dict[str, Any] = {
    "name": "r",
    "task": {"name": "digits"},
    "algorithm": {"name": "fedavg", "parameters": {"weights": "uniform"}},
    "local": {"steps": 3},
    "round": {"clients_per_round": 5, "min_clients": 5},
    "secure_aggregation": {"clip": 0.5},
    "population": 10,
}

MIN_STEPS: dict[str, Any] = {"secure_aggregation": {"min_steps": 2}}


def config(**sections: Any) -> RunConfig:
    """The run with some keys of some sections changed; an algorithm is changed whole."""
    values = dict(RUN)
    for name, value in sections.items():
        merge = isinstance(value, dict) and name != "algorithm"
        values[name] = {**RUN.get(name, {}), **value} if merge else value
    return from_values(values)


@pytest.mark.parametrize("name", ["fedavg", "fedcm", "fedadam", "fednova", "fedprox", "fedsam", "qg"])
def test_methods_whose_sums_are_multiples_of_the_mean_are_allowed(name: str) -> None:
    """With uniform weights and fixed steps; of others the tests of simulations have whole runs."""
    assert build_algorithm(config(algorithm={"name": name, "parameters": {"weights": "uniform"}})).name == name


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "scaffold"}},
        {"algorithm": {"name": "feddyn"}, "local": {"steps": None, "epochs": 1}},
        {"personal": ["head.*"]},
        {"local": {"continue_data": True}},
        {"local": {"optimizer": {"name": "adamw", "state": "device"}}},
    ],
)
def test_states_that_stay_on_the_devices_are_allowed(sections: dict[str, Any]) -> None:
    """They are made of the numbers in the sum, or are no part of an update."""
    wanted = config(**sections)
    assert build_algorithm(wanted).name == wanted.algorithm.name


@pytest.mark.parametrize(
    ("sections", "field", "reason"),
    [
        ({"round": {"close": "goal"}}, "round.close", "masks are of one cohort"),
        ({"round": {"reducer": "median"}}, "round.reducer", "which other reducers compare"),
        ({"round": {"max_update_norm": 1.0}}, "round.max_update_norm", "takes its place"),
        ({"round": {"clip_update_norm": 1.0}}, "round.clip_update_norm", "takes its place"),
        ({"round": {"max_relative_norm": 5.0}}, "round.max_relative_norm", "takes its place"),
        ({"round": {"max_client_share": 0.5}}, "round.max_client_share", "max_examples limits weights"),
        (
            {"evaluation": {"clients_every": 1}, "stop": {"rounds": 3, "patience": 2, "metric": "clients_loss"}},
            "stop.metric",
            "sums over clients are of the round before",
        ),
        ({"evaluation": {"clients_every": 1, "clients": 3}}, "evaluation.clients", "measure the model they received"),
        ({"encodings": {"update": "int8"}}, "encodings.update", "bits is their encoding"),
        (
            {"local": {"optimizer": {"name": "adamw", "state": "server"}}},
            "local.optimizer.state",
            "a rounded second moment may be negative",
        ),
        (
            {"algorithm": {"name": "mime"}},
            "algorithm.name",
            "such as mimelite, with [secure_aggregation]: what follows",
        ),
        (
            {"algorithm": {"name": "scaffold"}, "local": {"steps": None, "epochs": 1}, **MIN_STEPS},
            "local.steps",
            "two sums of its delta are rounded apart",
        ),
        (
            {"algorithm": {"name": "scaffold", "parameters": {"objective": "examples"}}, "population_examples": 9},
            "algorithm.parameters",
            "such a state at the server is of weights that are no part of the sums",
        ),
        (
            {"algorithm": {"name": "fednova"}, "local": {"steps": None, "epochs": 1}},
            "local.steps",
            "fednova needs the steps of each client, or their mean",
        ),
        (
            {"algorithm": {"name": "mimelite"}},
            "secure_aggregation.clips.full_gradient",
            "the largest L2 norm of the payload, which mimelite sums",
        ),
        (
            {"secure_aggregation": {"clips": {"full_gradient": 1.0}}},
            "secure_aggregation.clips.full_gradient",
            "no such payload",
        ),
        ({"algorithm": {"name": "fedavg"}}, "secure_aggregation.max_examples", "fedavg weights by examples"),
        (
            {"algorithm": {"name": "fedcm"}, "local": {"steps": None, "epochs": 1}},
            "secure_aggregation.min_steps",
            "fedcm divides updates by steps",
        ),
        (
            {
                "algorithm": {"name": "fedcm"},
                "local": {"steps": None, "epochs": 1, "schedule": {"kind": "cosine"}},
                **MIN_STEPS,
            },
            "local.steps",
            "fedcm needs the steps of each client",
        ),
        ({"round": {"clients_per_round": 501, "min_clients": 501}}, "round.clients_per_round", "at most 500"),
        ({"round": {"clients_per_round": 2, "min_clients": 2}}, "round.clients_per_round", "shares can be had with"),
        ({"secure_aggregation": {"min_clients": 2}}, "secure_aggregation.min_clients", "greater than or equal to 3"),
        ({"secure_aggregation": {"bits": 40}}, "secure_aggregation.bits", "less than or equal to 24"),
    ],
)
def test_a_setting_is_refused_by_its_name(sections: dict[str, Any], field: str, reason: str) -> None:
    """The message has the field and why it cannot be."""
    with pytest.raises(InvalidInput) as refused:
        build_algorithm(config(**sections))
    assert str(refused.value).startswith(f"{field}: expected ")
    assert reason in str(refused.value)


PRIVACY = {"unit": "client", "noise_multiplier": 1.0, "clip": 0.5, "delta": 0.01, "max_epsilon": 5.0}


def test_privacy_of_clients_is_allowed_with_cohorts_of_a_fixed_size() -> None:
    """Its rate is the share of the fewest clients that a cohort is drawn of."""
    run = config(privacy=PRIVACY, round={"min_clients": 10})
    build_algorithm(run)
    assert run.rate_of_clients == 0.5
    assert config(privacy=PRIVACY, round={"min_clients": None}).rate_of_clients == 1.0


@pytest.mark.parametrize(
    ("sections", "field", "reason"),
    [
        ({"round": {"sampling": "bernoulli", "rate": 0.5}}, "round.sampling", "its keys are of one cohort"),
        ({"secure_aggregation": {"clip": 0.4}}, "secure_aggregation.clip", "devices clip once"),
        ({"privacy": {**PRIVACY, "clip_quantile": 0.5}}, "privacy.clip_quantile", "nobody sees which updates"),
        ({"evaluation": {"clients_every": 1}}, "evaluation.clients_every", "no noise"),
        ({"algorithm": {"name": "scaffold"}}, "algorithm.name", "other payloads and states would need noise"),
    ],
)
def test_what_privacy_of_clients_refuses_beside_it(sections: dict[str, Any], field: str, reason: str) -> None:
    """The noise is for one sum of vectors of a known length."""
    with pytest.raises(InvalidInput, match=reason) as refused:
        build_algorithm(config(**{"privacy": PRIVACY, **sections}))
    assert str(refused.value).startswith(f"{field}: expected ")
