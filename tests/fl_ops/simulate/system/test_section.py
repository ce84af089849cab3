"""The table [simulation.system]: accepted values, and messages for others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.system.section import Column, DutyCycle, Lognormal, SystemSection, Uniform

RUN = {"task": {"name": "digits"}}


def parse(**system: Any) -> SystemSection:
    """The section of a run's file."""
    found = parse_simulation({**RUN, "simulation": {"system": {"speed": 10, **system}}}).simulation.system
    assert found is not None
    return found


def test_no_table_means_no_simulated_time() -> None:
    """Without the table, there is no section."""
    assert parse_simulation(RUN).simulation.system is None


def test_a_quantity_is_a_number_a_distribution_or_a_column() -> None:
    """Each form is read as its own kind, and written back as it was."""
    forms: list[Any] = [
        {"distribution": "lognormal", "median": 100.0, "sigma": 0.5},
        {"distribution": "uniform", "low": 1.0, "high": 2.0},
        {"file": "devices.csv", "column": "down"},
    ]
    section = parse(speed=forms[0], down=forms[1], up=forms[2], latency_s=3, availability={"on_s": 60, "off_s": 30})
    assert [type(section.speed), type(section.down), type(section.up)] == [Lognormal, Uniform, Column]
    assert (section.latency_s, section.availability) == (3.0, DutyCycle(on_s=60, off_s=30))
    assert [section.model_dump()[name] for name in ("speed", "down", "up")] == forms
    assert SystemSection.model_validate(section.model_dump()) == section


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        pytest.param({"speed": 0}, "system.speed: expected a number greater than 0, got 0", id="no-speed"),
        pytest.param({"speed": "fast"}, "system.speed: expected a number, { distribution =", id="text"),
        pytest.param({"speed": True}, "system.speed: expected a number, { distribution =", id="bool"),
        pytest.param({"speed": float("inf")}, "system.speed: expected a number, { distribution =", id="infinite"),
        pytest.param({"up": {"distribution": "normal"}}, "system.up: expected a number, {", id="unknown-distribution"),
        pytest.param(
            {"up": {"distribution": "lognormal", "median": 1}}, "system.up: sigma: expected a value, found none",
            id="no-sigma",
        ),
        pytest.param(
            {"up": {"distribution": "uniform", "low": 2, "high": 1}}, "system.up: expected low to be at most high (1)",
            id="crossed",
        ),
        pytest.param(
            {"down": {"distribution": "uniform", "low": 0, "high": 1}}, "system.down: expected a number greater than 0",
            id="uniform-from-0",
        ),
        pytest.param({"down": {"file": "a.csv"}}, "system.down: column: expected a value, found none", id="no-column"),
        pytest.param({"drop_out": 1}, "system.drop_out: expected a probability from 0 to 0.99, got 1", id="never"),
        pytest.param(
            {"drop_out": {"distribution": "lognormal", "median": 0.1, "sigma": 1}},
            "system.drop_out: expected a probability from 0 to 0.99, got a lognormal distribution", id="unlimited",
        ),
        pytest.param({"latency_s": -1}, "system.latency_s: expected a number of seconds, 0 or more", id="negative"),
        pytest.param({"availability": 0.5}, "system.availability: expected { on_s = 3600", id="availability"),
        pytest.param({"availability": {"on_s": 5}}, "system.availability: off_s: expected a value", id="no-off"),
        pytest.param({"spede": 1}, "system.spede: unknown key, did you mean speed?", id="misspelt"),
    ],
)  # fmt: skip
def test_invalid_values(system: dict[str, Any], expected: str) -> None:
    """The message names the key, what was expected and what was found."""
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse(**system)


def test_the_speed_is_required() -> None:
    """A section without the speed does not state how long work takes."""
    with pytest.raises(ValueError, match=r"system\.speed: expected a value, found none"):
        parse_simulation({**RUN, "simulation": {"system": {"down": 1}}})
