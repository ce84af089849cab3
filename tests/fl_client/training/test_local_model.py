"""The device's model keeps its own frozen parameters apart from those that a run sends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_client.errors import WorkFailed
from fl_client.training.local_model import LocalModel
from protos.fl.v1 import coordinator_pb2 as pb
from protos.frozen import frozen_resource


def model(value: float = 1.0) -> nn.Module:
    """A trained layer after a frozen one of a fixed value."""
    made = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    made[0].weight = nn.Parameter(torch.full((2, 2), value), requires_grad=False)
    return made


def wanted(value: float = 1.0) -> torch.Tensor:
    """The frozen part of `model`."""
    return torch.full((2, 2), value)


def test_values_of_a_run_are_replaced_by_a_new_model() -> None:
    """After a run sent other frozen parameters, a run of the device's own gets a new module with them."""
    local = LocalModel(model)
    resource = frozen_resource({"0.weight": wanted()})
    first = local.module()
    assert (local.frozen, resource is not None) == (resource, True)
    assert local.with_own_frozen(resource) is first  # type: ignore[arg-type] # it is not None
    with torch.no_grad():
        first.get_parameter("0.weight").fill_(7.0)
    local.replaced()
    again = local.with_own_frozen(resource)  # type: ignore[arg-type] # it is not None
    assert torch.equal(again.get_parameter("0.weight"), wanted())


def test_other_frozen_parameters_than_the_runs_fail_the_work() -> None:
    """The reason is the layout, and the message has both digests."""
    resource = frozen_resource({"0.weight": wanted(2.0)})
    assert resource is not None
    with pytest.raises(WorkFailed, match=r"expected the frozen parameters blake3:\w+, got blake3:\w+ from") as failed:
        LocalModel(model).with_own_frozen(resource)
    assert failed.value.reason == pb.FAILURE_REASON_LAYOUT


def test_a_model_without_frozen_parameters_offers_none() -> None:
    """There is no resource of no tensors."""
    assert LocalModel.of(nn.Linear(2, 1)).frozen is None
