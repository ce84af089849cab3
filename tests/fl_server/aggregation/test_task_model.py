"""The task's module holds values only while it is in use."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

import algorithms as fl
from fl_server.aggregation.evaluation import EvaluatedModel
from fl_server.aggregation.task_model import CPU, TaskModel
from fl_tasks import Task
from tests.processes.tiny_task import Tiny


class Tied(nn.Module):
    """A tied weight, a view of it, a buffer that is saved and one that is not."""

    seen: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.row = self.one.weight.detach()[0]
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.rand(4), persistent=False)


class TiedTask:
    """A task of which only the model is used."""

    def model(self) -> nn.Module:
        """The module above."""
        return Tied()


@pytest.fixture
def model() -> TaskModel:
    """The task's model with seed 5."""
    return TaskModel(cast(Task, TiedTask()), 5)


def first(model: TaskModel) -> fl.ModelState:
    """Copies of the initial values."""
    with model.first() as values:
        copies = fl.ModelState(
            *({n: t.clone() for n, t in part.items()} for part in (values.trainable, values.buffers, {}))
        )
        del values
    return copies


def bytes_of(model: TaskModel) -> int:
    """Bytes that the tensors of the state_dict hold now."""
    if model._module is None:
        return 0
    return sum(tensor.untyped_storage().nbytes() for tensor in {*model._module.state_dict().values()})


def test_values_are_released_and_filled_again(model: TaskModel) -> None:
    """No memory is held before and after. Tied weights and views have the filled values; the table is unchanged."""
    values = first(model)
    assert isinstance(model._module, Tied)
    table = model._module.table.clone()
    assert bytes_of(model) == 0
    with model.filled(values) as module:
        assert isinstance(module, Tied)
        assert torch.equal(module.two.weight, values.trainable["one.weight"])
        assert torch.equal(module.row, values.trainable["one.weight"][0])
        assert torch.equal(module.table, table)
        del module
    assert bytes_of(model) == 0
    assert model._module is not None


def test_a_module_cannot_change_the_given_values(model: TaskModel) -> None:
    """It works on copies."""
    values = first(model)
    before = values.trainable["one.weight"].clone()
    with torch.no_grad(), model.filled(values) as module:
        assert isinstance(module, Tied)
        module.one.weight.zero_()
        module.seen.fill_(1.0)
    assert torch.equal(values.trainable["one.weight"], before)
    assert not values.buffers["seen"].any()


def test_values_are_released_when_an_evaluation_fails(model: TaskModel) -> None:
    """The module is empty afterwards, and can be filled again."""
    values = first(model)
    with pytest.raises(ZeroDivisionError), model.filled(values):
        raise ZeroDivisionError
    assert bytes_of(model) == 0
    with model.filled(values) as module:
        assert isinstance(module, Tied)
        assert torch.equal(module.one.weight, values.trainable["one.weight"])


def test_the_initial_values_can_be_read_again(model: TaskModel) -> None:
    """An empty module is built again from the same seed."""
    assert torch.equal(first(model).trainable["one.weight"], first(model).trainable["one.weight"])


class KeptTask:
    """A task that makes its model once."""

    def __init__(self) -> None:
        self.kept = nn.Linear(2, 2)

    def model(self) -> nn.Module:
        """Always the same module."""
        return self.kept


class HoldingTask(TiedTask):
    """A task that holds on to the last model it made, from its second on."""

    def __init__(self) -> None:
        self.made: list[nn.Module] = []

    def model(self) -> nn.Module:
        """A new module."""
        made = super().model()
        self.made = [made] if self.made else [nn.Identity()]
        return made


def test_two_runs_of_a_task_that_returns_one_module_do_not_disturb_each_other() -> None:
    """Both begin from the same values, whatever the other has filled in. The task's module is unchanged."""
    task = KeptTask()
    before = task.kept.weight.detach().clone()
    for _ in range(2):
        model = TaskModel(cast(Task, task), 5)
        values = first(model)
        assert torch.equal(values.trainable["weight"], before)
        with model.filled(fl.ModelState({n: t + 1 for n, t in values.trainable.items()}, {}, {})) as module:
            assert module is not task.kept
            del module
    assert torch.equal(task.kept.weight, before)


def test_memory_that_the_task_holds_is_not_released() -> None:
    """Only a module that nothing else holds loses its values. The model of the next use is a new one."""
    task = HoldingTask()
    model = TaskModel(cast(Task, task), 5)
    values = first(model)
    with model.filled(values) as module:
        row = next(module.parameters()).detach()[0]
        del module
    assert model._module is None
    assert torch.equal(row, values.trainable["one.weight"][0])
    with model.filled(values) as module:
        assert torch.equal(next(module.parameters()), values.trainable["one.weight"])


class CountedTask(Tiny):
    """A task that counts its models."""

    made = 0

    def model(self) -> nn.Module:
        self.made += 1
        return super().model()


def test_one_module_serves_all_evaluations() -> None:
    """Nothing of an evaluation holds the module, so the next one fills it again and builds no other."""
    task = CountedTask()
    model = EvaluatedModel(task, CPU, 16, seed=5)
    values, before = first(model), task.made
    assert model.evaluate(values) == model.evaluate(values)
    model.whole(values)
    model.part(values, 0, 2)
    assert task.made == before
