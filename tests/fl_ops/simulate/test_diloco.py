"""A run of DiLoCo with two workers is plain torch: AdamW and its schedule go on over the rounds, and so do the data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.optimizers.spec import RateSchedule
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.simulation import Simulation
from fl_server.rounds.sampling import training_seed
from fl_server.run_settings.config import RunConfig
from fl_tasks.data.examples import Examples
from fl_tasks.loading import load_task
from tests.fl_ops.simulate.conftest import RUN

STEPS, ROUNDS, RATE, BATCH = 5, 4, 0.01, 8
SCHEDULE = {"kind": "cosine", "warmup": 0.2, "end": 0.1, "over": "run"}
PARTS = {"a": torch.arange(30), "b": torch.arange(30, 57)}


def config(**local: Any) -> RunConfig:
    """A run of both workers in each round; its epochs end within a round."""
    steps = {"learning_rate": RATE, "steps": STEPS, "batch_size": BATCH, "schedule": SCHEDULE}
    return RunConfig.model_validate(
        {
            "name": "r",
            "task": RUN["task"],
            "algorithm": {"name": "diloco"},
            "local": {**steps, **local},
            "round": {"clients_per_round": 2},
            "stop": {"rounds": ROUNDS},
            "seed": 5,
        }
    )


def read_on(examples: Examples, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch in a new order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(examples), generator=generator).split(BATCH):
            yield examples.inputs[chosen], examples.targets[chosen]


def by_torch(start: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model after all rounds, by torch's AdamW for each worker and its SGD for the mean."""
    task, factor = load_task(RUN["task"]["name"], {}), RateSchedule("cosine", 0.2, 0.1).factor
    shared, workers = task.model(), {}
    shared.load_state_dict(start)
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for name, part in PARTS.items():
        model = copy.deepcopy(shared)
        examples = SimulatedClients(RUN["task"]["name"], task, PARTS)[name].train
        assert isinstance(examples, Examples)
        assert len(examples) == len(part)
        workers[name] = model, torch.optim.AdamW(model.parameters()), read_on(examples, training_seed(5, 0, name))
    for round_ in range(ROUNDS):
        for model, optimizer, batches in workers.values():
            model.load_state_dict(shared.state_dict())
            for step, (inputs, targets) in enumerate(itertools.islice(batches, STEPS)):
                optimizer.param_groups[0]["lr"] = RATE * factor(round_ * STEPS + step, ROUNDS * STEPS)
                optimizer.zero_grad()
                task.loss(model(inputs), targets).backward()
                optimizer.step()
        step_outer(shared, [model for model, _, _ in workers.values()], outer)
    return shared.state_dict()


def step_outer(shared: nn.Module, models: list[nn.Module], outer: torch.optim.Optimizer) -> None:
    """The outer step, whose gradient is the negative mean of what the workers moved."""
    for name, parameter in shared.named_parameters():
        moved = [model.get_parameter(name).detach() - parameter.detach() for model in models]
        parameter.grad = -torch.stack(moved).mean(dim=0)
    outer.step()


def simulated(**local: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model before the first round and after the last one."""
    task = load_task(RUN["task"]["name"], {})
    with Simulation(config(**local), SimulatedClients(RUN["task"]["name"], task, PARTS)) as simulation:
        start = {name: tensor.clone() for name, tensor in simulation.model().items()}
        for _ in simulation.rounds():
            pass
        return start, {name: tensor.clone() for name, tensor in simulation.model().items()}


def test_two_workers_are_plain_torch() -> None:
    """With the preset's optimizer, state and data."""
    start, end = simulated()
    expected = by_torch(start)
    for name, tensor in end.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_data_that_begin_anew_give_another_model() -> None:
    """So the comparison above can fail by the order of the data alone."""
    start, end = simulated(continue_data=False)
    expected = by_torch(start)
    assert any(not torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-4) for name, tensor in end.items())
