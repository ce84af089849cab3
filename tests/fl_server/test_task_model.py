"""A module that holds values only while it is used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import algorithms as fl
from fl_server.task_model import TaskModel


class Tied(nn.Module):
    """A tied weight, a view of it, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.row = self.one.weight.detach()[0]
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.rand(4), persistent=False)


class TiedTask:
    """Only its model is asked for."""

    def model(self):
        """The one above."""
        return Tied()


@pytest.fixture
def model():
    """Of seed 5."""
    return TaskModel(TiedTask(), 5)


def first(model):
    """Copies of the first values."""
    with model.first() as values:
        return fl.ModelState(
            *({n: t.clone() for n, t in part.items()} for part in (values.trainable, values.buffers, {}))
        )


def bytes_of(model):
    """What the tensors of the state_dict hold now."""
    return sum(tensor.untyped_storage().nbytes() for tensor in {*model._module.state_dict().values()})


def test_values_are_let_go_of_and_come_back(model):
    """Nothing is held before and after; meanwhile tied weights and views see the values, and the table is unchanged."""
    values, table = first(model), model._module.table.clone()
    assert bytes_of(model) == 0
    with model.filled(values) as module:
        assert torch.equal(module.two.weight, values.trainable["one.weight"])
        assert torch.equal(module.row, values.trainable["one.weight"][0])
        assert torch.equal(module.table, table)
    assert bytes_of(model) == 0


def test_a_module_cannot_change_what_it_was_filled_with(model):
    """It has copies."""
    values = first(model)
    before = values.trainable["one.weight"].clone()
    with torch.no_grad(), model.filled(values) as module:
        module.one.weight.zero_()
        module.seen.fill_(1.0)
    assert torch.equal(values.trainable["one.weight"], before)
    assert not values.buffers["seen"].any()


def test_values_are_let_go_of_when_an_evaluation_fails(model):
    """The module is empty again, and can be filled again."""
    values = first(model)
    with pytest.raises(ZeroDivisionError), model.filled(values):
        raise ZeroDivisionError
    assert bytes_of(model) == 0
    with model.filled(values) as module:
        assert torch.equal(module.one.weight, values.trainable["one.weight"])


def test_the_first_values_can_be_asked_for_again(model):
    """A module that is empty is built anew, from the same seed."""
    assert torch.equal(first(model).trainable["one.weight"], first(model).trainable["one.weight"])
