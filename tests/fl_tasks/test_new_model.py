"""A task's model is nobody else's, its values can be sent, and one that is too large is refused before it is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_tasks import Task, TaskError
from fl_tasks.new_model import ModelTooLarge, SizeLimit, held_outside, new_model


class Made:
    """A task of which only the model is used."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.model = make


def built(make: Callable[[], object]) -> nn.Module:
    """The model of such a task, under a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return new_model(cast(Task, Made(make)))


class Viewed(nn.Module):
    """A layer with a view of its weight, a hook of its own, a weight used twice, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.cell = nn.Linear(2, 2), nn.Linear(2, 2), nn.LSTM(2, 3)
        self.two.weight = self.one.weight
        self.row = self.one.weight.detach()[0]
        self.register_forward_pre_hook(self.before)

    def before(self, module: nn.Module, inputs: object) -> None:
        """A bound method, which holds the module."""


class Strided(nn.Module):
    """A parameter and a buffer of stride 0, a transposed weight, and a convolution in channels_last."""

    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1).expand(3))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
        self.register_buffer("ids", torch.ones(1).expand(3))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_a_new_module_is_built_once() -> None:
    """Views, hooks, tied weights and recurrent layers inside a module hold nothing outside of it."""
    made: list[str] = []

    def make() -> nn.Module:
        made.append("one more")
        return Viewed()

    assert isinstance(built(make), Viewed)
    assert len(made) == 1


def test_a_module_that_the_task_keeps_is_copied() -> None:
    """Values written into the model do not reach the module that the task returns again."""
    kept = nn.Linear(2, 3)
    before = kept.weight.detach().clone()
    model = built(lambda: kept)
    with torch.no_grad():
        model.get_parameter("weight").fill_(7.0)
    assert torch.equal(kept.weight, before)
    assert torch.equal(built(lambda: kept).get_parameter("weight"), before)


def test_a_backbone_that_the_task_keeps_is_copied() -> None:
    """The part that is made anew has the values of the seed, although the model was made twice."""
    spine = nn.Linear(2, 2)
    model, again = (built(lambda: nn.Sequential(spine, nn.Linear(2, 2))) for _ in range(2))
    assert model.get_submodule("0") is not spine
    assert torch.equal(model.get_parameter("1.weight"), again.get_parameter("1.weight"))


@pytest.mark.parametrize("frozen", [False, True])
def test_tensors_that_the_task_keeps_are_copied(frozen: bool) -> None:
    """A parameter on a kept tensor, or on an array of numpy that training would change, gets its own memory."""
    array = np.ones(3, np.float32)
    kept = torch.ones(3) if frozen else torch.from_numpy(array)
    made = built(lambda: nn.ParameterList([nn.Parameter(kept, requires_grad=not frozen)]))
    with torch.no_grad():
        made.get_parameter("0").zero_()
    assert kept.sum() == array.sum() == 3


def test_a_kept_module_that_cannot_be_copied_is_refused() -> None:
    """The error says to make a new one."""
    kept = nn.Linear(2, 2)
    kept.lock = threading.Lock()  # type: ignore[assignment] # any attribute of the author's
    with pytest.raises(TaskError, match=r"returned the same module, or parts of it, twice.*make a new one"):
        built(lambda: kept)


def test_a_module_of_a_task_that_keeps_the_last_one_is_held_outside() -> None:
    """A reference from anywhere is found; the list that is asked about does not count."""
    owner: list[nn.Module] = [Viewed()]
    assert not held_outside(owner)
    weight = owner[0].get_parameter("one.weight")
    assert held_outside(owner)
    del weight


def test_values_with_strides_are_made_contiguous() -> None:
    """Expanded and transposed values keep their numbers; channels_last stays."""
    model = built(Strided)
    assert isinstance(model, Strided)
    assert all(tensor.is_contiguous() for tensor in (model.bias, model.turned, model.ids))
    assert model.turned.tolist() == torch.arange(6.0).view(2, 3).T.tolist()
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def on_meta() -> nn.Module:
    """A model without values."""
    with torch.device("meta"):
        return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "came"),
    [
        pytest.param(lambda: None, "got None", id="none"),
        pytest.param(lambda: nn.Linear, "got the class Linear: return an instance", id="class"),
        pytest.param(lambda: on_meta, r"got the function on_meta: put it into the forward\(\)", id="function"),
        pytest.param(dict, "an object of type dict", id="dict"),
        pytest.param(on_meta, "'weight' on the device \"meta\"", id="meta"),
        pytest.param(lambda: nn.LazyLinear(3), "'weight' of a lazy module, which has no shape yet", id="lazy"),
        pytest.param(lambda: nn.ParameterList([torch.eye(2).to_sparse()]), "'0' in the form sparse_coo", id="sparse"),
    ],
)
def test_a_result_without_values_is_refused_by_name(make: Callable[[], object], came: str) -> None:
    """The error says what was expected and what came."""
    with pytest.raises(TaskError, match=rf"the task's model\(\): expected a torch.nn.Module with values, .*{came}"):
        built(make)


MIB = 1 << 20


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.Linear(1 << 20, 1 << 20), id="one-tensor"),
        pytest.param(lambda: [nn.Linear(100, 100) for _ in range(10**6)], id="many-tensors"),
        pytest.param(lambda: [nn.Linear(1, 1) for _ in range(10**6)], id="many-small-ones"),
    ],
)
def test_a_model_over_the_limit_is_not_made(make: Callable[[], object]) -> None:
    """A tensor of 4 TiB is never asked for; of many tensors those are made that fit."""
    with pytest.raises(ModelTooLarge, match=r"\d+ bytes"), SizeLimit(8 * MIB):
        make()


def test_memory_that_is_freed_while_a_model_is_made_does_not_count() -> None:
    """Temporary tensors of 40 MiB in all, one after the other, and views pass a limit of 8 MiB."""
    with SizeLimit(8 * MIB):
        kept = nn.Linear(1000, 1000)
        for _ in range(10):
            kept.weight.data.copy_(torch.randn(1000, 1000).view(-1).view(1000, 1000))
    assert kept.weight.any()


def test_a_model_within_the_limit_has_the_same_bits() -> None:
    """The limit changes neither the values nor the random numbers that follow."""
    found = []
    for limit in (None, SizeLimit(8 * MIB)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            if limit is None:
                model = nn.LSTM(20, 30, 2)
            else:
                with limit:
                    model = nn.LSTM(20, 30, 2)
            found.append([*model.state_dict().values(), torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
