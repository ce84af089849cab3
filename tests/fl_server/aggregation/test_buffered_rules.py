"""What a run with a buffer excludes: each setting is refused by its name, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from fl_server.aggregation.methods import build_algorithm
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_spec, from_values, to_spec
from tests.fl_server.aggregation.test_buffered_step import engine

RUN: dict[str, Any] = {
    "task": {"name": "digits"},
    "algorithm": {"name": "fedavg", "parameters": {"weights": "uniform"}},
    "local": {"steps": 3},
    "round": {"close": "buffer", "goal": 5},
    "population": 10,
}

PRIVATE = {"unit": "client", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "max_epsilon": 8.0}


def config(**sections: Any) -> RunConfig:
    """The run with some keys of some sections changed; an algorithm is changed whole."""
    values = dict(RUN)
    for name, value in sections.items():
        merge = isinstance(value, dict) and name != "algorithm"
        values[name] = {**RUN.get(name, {}), **value} if merge else value
    return from_values(values)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedcm", "fedadam", "fedprox", "mofedsam", "qg", "mimelite", "mfl", "slowmo"]
)
def test_sound_methods_are_allowed(name: str) -> None:
    """Their server steps are defined for updates of several versions."""
    assert build_algorithm(config(algorithm={"name": name})).name == name


@pytest.mark.parametrize(
    ("sections", "field", "reason"),
    [
        ({"algorithm": {"name": "scaffold"}}, "algorithm.name", "keep a state"),
        ({"algorithm": {"name": "mime"}}, "algorithm.name", "two exchanges"),
        ({"algorithm": {"name": "diloco"}}, "local.continue_data", "begins again"),
        (
            {"algorithm": {"name": "fedcm"}, "local": {"optimizer": {"name": "adamw"}, "inexact": True}},
            "local.optimizer",
            "linear",
        ),
        ({"round": {"max_client_share": 0.5}}, "round.max_client_share", "more than once"),
        ({"round": {"reducer": "median"}}, "round.reducer", "updates of one model"),
        ({"encodings": {"update": "topk", "fraction": 0.1}}, "encodings.update", "leaves a rest"),
        (
            {"algorithm": {"name": "fedcm"}, "encodings": {"update": "int8", "reference": "direction"}},
            "encodings.reference",
            "before their step",
        ),
        ({"personal": ["head.*"]}, "personal", "a client begins again"),
        ({"secure_aggregation": {"clip": 1.0}}, "round.close", "masks are of one cohort"),
        ({"privacy": PRIVATE}, "round", "takes part and counts must not depend"),
        ({"round": {"staleness": {"kind": "hinge", "exponent": 1.0}}}, "round.staleness.exponent", "with its values"),
        ({"round": {"staleness": {"kind": "hinges"}}}, "round.staleness.kind", "Did you mean 'hinge'"),
    ],
)
def test_what_a_buffer_excludes_has_its_reason(sections: dict[str, Any], field: str, reason: str) -> None:
    """The message has the path of the setting and why."""
    with pytest.raises(InvalidInput, match=reason) as refused:
        build_algorithm(config(**sections))
    assert refused.value.field.startswith(field)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"close": "buffer"}, "expected goal, the updates of a step"),
        ({"close": "cohort", "goal": 3}, "expected goal only with close"),
        ({"close": "goal", "max_staleness": 3}, "expected max_staleness only with close"),
        ({"close": "buffer", "goal": 3, "quorum": 2}, "expected no quorum"),
        ({"close": "buffer", "goal": 3, "sampling": "bernoulli"}, "expected no sampling"),
        ({"close": "buffer", "goal": 3, "clients_per_round": 3}, "expected no clients_per_round"),
        ({"close": "buffer", "goal": 3, "min_accepted": 4}, "expected goal to be at least min_accepted"),
        ({"close": "buffer", "goal": 3, "max_staleness": 2000}, "less than or equal to 1000"),
    ],
)
def test_settings_of_cohorts_and_of_buffers_are_apart(section: dict[str, Any], message: str) -> None:
    """A setting that would not be read is refused."""
    with pytest.raises(InvalidInput, match=message):
        from_values({**RUN, "round": section})


def test_defaults_travel_and_come_back() -> None:
    """A goal is enough; the rest is filled in, and the configuration is the same after the wire and the ledger."""
    made = config()
    assert (made.round.concurrency, made.round.max_staleness) == (5, 20)
    assert made.round.staleness is not None
    assert made.round.staleness.kind == "polynomial"
    assert from_spec(to_spec(made)) == made
    assert from_values(made.model_dump()) == made
    assert engine("fedavg").config.round.fewest == 3
