"""docs/training/optimizers.md: its run trains, its settings are read, and its table of methods has their reasons."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import algorithms as fl
from algorithms.optimizers.classes import BUILT_IN
from fl_client.settings.config import ClientConfig
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import SimulationConfig, parse_simulation
from fl_ops.simulate.simulation import Simulation
from fl_server.aggregation.methods import optimizer_spec, rate_schedule

PAGE = (Path(__file__).parents[3] / "docs/training/optimizers.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```toml\n# (\w+\.toml)\n(.*?)```", PAGE, re.DOTALL))


def run() -> SimulationConfig:
    """The page's run."""
    return parse_simulation(tomllib.loads(FILES["run.toml"]))


def test_the_run_of_the_page_has_its_optimizer() -> None:
    """The arguments beside the name are the optimizer's parameters."""
    local = run().run.local
    spec, schedule = optimizer_spec(local), rate_schedule(local.schedule)
    assert spec.parameters == {"weight_decay": 0.01, "betas": (0.9, 0.99)}
    assert (spec.name, spec.state, schedule.kind, local.micro_batch_size) == ("adamw", "device", "cosine", 8)


@pytest.mark.slow
def test_the_run_of_the_page_trains() -> None:
    """Three rounds, and the loss falls in each."""
    prepared = prepare(run(), 0)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        losses = [done.metrics["loss"] for done in simulation.rounds()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3


def test_the_settings_of_the_page_are_read() -> None:
    """A device lists a class of another package."""
    settings = {
        "client_id": "a",
        "server": "127.0.0.1:1",
        "state_dir": "x",
        "insecure": True,
        "task": {"name": "digits"},
    }
    config = ClientConfig.model_validate({**settings, **tomllib.loads(FILES["client.toml"])})
    assert config.optimizers == ["my_optimizers:Sophia"]


def test_every_optimizer_is_on_the_page() -> None:
    """Built-in names are in the first column."""
    table = PAGE.split("## The optimizer")[1].split("##")[0]
    assert set(BUILT_IN) <= set(re.findall(r"`([\w:.]+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))


@pytest.mark.parametrize("method", fl.names())
def test_the_page_has_what_holds_of_each_method(method: str) -> None:
    """Its row is that of the program, with the reason word for word."""
    table = PAGE.split("## What holds of each method")[1].split("##")[0]
    rows = [
        row for row in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE) if f"`{method}`" in row[0]
    ]
    assert rows, "it has no row"
    algorithm = fl.build(method)
    for methods, allowed, why in rows:
        if "option I" in methods and "option II" not in methods:
            assert not fl.build(method, option="I").needs_sgd
            continue
        assert {"allowed": "", "`inexact`": algorithm.needs_sgd, "never": algorithm.own_steps}[allowed] in why
        assert (allowed == "allowed") == (not algorithm.needs_sgd and not algorithm.own_steps)
