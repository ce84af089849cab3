"""Inputs of which no correct result can be made are refused, and the message names what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import algorithms as fl
from algorithms.parameters import AlgorithmError

X = {"w": torch.zeros(2)}
INFO = fl.RoundInfo(0, 0.1, population=3)


def update(client: str, value: float = 1.0) -> tuple[fl.UpdateInfo, fl.Tensors]:
    """A delta of two numbers."""
    return fl.UpdateInfo(client, 1, 1), {"w": torch.tensor([1.0, value])}


def apply(updates: list[tuple[fl.UpdateInfo, fl.Tensors]], method: str = "fedavg", **parameters: Any) -> fl.ServerState:
    """The state after a round with these updates."""
    algorithm = fl.build(method, **parameters)
    return fl.apply_updates(algorithm, algorithm.init(X), updates, INFO)


def test_two_updates_of_one_client() -> None:
    """Both would count."""
    with pytest.raises(ValueError, match="expected one update of each client, got more of a, c"):
        apply([update("a"), update("b"), update("c"), update("a"), update("c")])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(value: float) -> None:
    """The message names client, payload and tensor."""
    with pytest.raises(ValueError, match="update of b, delta, tensor 'w': expected finite values, got a NaN"):
        apply([update("a"), update("b", value)])


def test_finite_values_with_an_infinite_sum_are_accepted() -> None:
    """Two values of 3e38 are each finite."""
    assert torch.isfinite(apply([(fl.UpdateInfo("a", 1, 1), {"w": torch.full((2,), 3e38)})]).x["w"]).all()


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_a_cohort_larger_than_the_population(method: str) -> None:
    """The sum of the variates would move by more than all of them."""
    with pytest.raises(ValueError, match="expected a cohort of at most the population's 3 clients, got 4"):
        apply([update(client) for client in "abcd"], method)
    assert len(apply([update(client) for client in "abc"], method).x) == 1


@pytest.mark.parametrize(
    ("method", "parameters", "sends"),
    [
        ("mimelite", {}, "delta, full_gradient"),
        ("mime", {}, "full_gradient, then delta"),
        ("mfl", {}, "delta, client_momentum"),
        ("scaffold", {"option": "I"}, "delta, variate_change"),
    ],
)
def test_deltas_alone_where_clients_send_more(method: str, parameters: dict[str, Any], sends: str) -> None:
    """The message names the payloads and the functions for them."""
    with pytest.raises(
        AlgorithmError, match=f"{method}: .* one delta, got one whose clients send {sends}; use run_round"
    ):
        apply([update("a")], method, **parameters)


@pytest.mark.parametrize(
    ("method", "payload"), [("mimelite", "full_gradient"), ("mime", "full_gradient"), ("mfl", "client_momentum")]
)
def test_an_update_without_a_payload(method: str, payload: str) -> None:
    """Client and payload are named."""
    exchange = fl.build(method).exchanges[0]
    sent = {other: X for other in exchange.payloads if other != payload}
    with pytest.raises(ValueError, match=f"update of a: expected the payloads .*{payload} is missing"):
        fl.sum_exchange(exchange, [(fl.UpdateInfo("a", 1, 1), sent)], INFO)


@pytest.mark.parametrize(("method", "missing"), [("mimelite", "cbar"), ("mime", "cbar"), ("mfl", "u"), ("feddyn", "H")])
def test_a_server_step_without_a_sum(method: str, missing: str) -> None:
    """The method and the sum are named."""
    algorithm = fl.build(method)
    with pytest.raises(AlgorithmError, match=f"{method}: expected the sum '{missing}', got Dbar"):
        algorithm.server_step(algorithm.init(X), {"Dbar": X}, INFO)


def test_the_second_direction_without_the_first_exchange_s_sums() -> None:
    """Mime's direction is made of the full gradients."""
    mime = fl.build("mime")
    with pytest.raises(AlgorithmError, match="mime: expected the sum 'cbar', got none"):
        mime.exchanges[1].direction(mime.init(X), {})


def test_a_server_state_without_the_method_s_memory() -> None:
    """For example the state of another method."""
    mfl = fl.build("mfl")
    state = fl.build("fedavg").init(X)
    with pytest.raises(AlgorithmError, match="mfl: expected the memory u in the server's state, got none; start from"):
        mfl.direction(state)
    with pytest.raises(AlgorithmError, match="mfl: expected the memory u"):
        mfl.server_step(state, {"Dbar": X, "u": X}, INFO)


@pytest.mark.parametrize("method", ["mimelite", "mime", "mfl", "fedcm", "scaffold"])
def test_a_client_without_the_direction(method: str) -> None:
    """The message names what should have been fetched."""
    with pytest.raises(AlgorithmError, match="in addition to the model, got none; fetch the round's direction too"):
        fl.build(method).client_rule(fl.ClientContext(state={"c_i": X}))


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_a_next_state_without_the_delta(method: str) -> None:
    """The payload is named."""
    context = fl.ClientContext(X, {"c_i": X, "h_i": X})
    with pytest.raises(AlgorithmError, match="expected the update with the payload delta, got none"):
        fl.build(method).next_client_state(context, fl.ClientUpdate({}, {}, 1, 0.1))


def test_fedrobust_without_its_map() -> None:
    """An update without the map after its steps, and a state that lacks a part."""
    robust = fl.build("fedrobust")
    with pytest.raises(AlgorithmError, match="fedrobust: expected the input map after the last step"):
        robust.next_client_state(fl.ClientContext(), fl.ClientUpdate({"delta": X}, {}, 1, 0.1))
    with pytest.raises(AlgorithmError, match="expected L and q in the client's state A_i, got L"):
        robust.client_rule(fl.ClientContext(state={"A_i": {"L": torch.ones(1)}}))


EMPTY = (torch.zeros(0, 2), torch.zeros(0, 1))
SOME = (torch.ones(3, 2), torch.ones(3, 1))


@pytest.mark.parametrize("batches", [[EMPTY], [SOME, EMPTY]], ids=["only", "last"])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "mimelite", "fedrobust"])
def test_a_batch_of_no_examples(method: str, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Its mean loss would be NaN, and so would the model be. For local steps and for full gradients."""
    algorithm, model = fl.build(method), nn.Linear(2, 1)
    direction = algorithm.direction(algorithm.init(fl.read_state(model).trainable))
    work = fl.Work(algorithm, fl.ClientContext(direction), fl.LocalSettings(0.1))
    for data in (
        fl.LocalData(batches, [SOME], functional.mse_loss),
        fl.LocalData([SOME], batches, functional.mse_loss),
    ):
        if data.batches is not batches and not algorithm.exchanges[0].passes:
            continue
        with pytest.raises(ValueError, match="expected at least one example in every batch, got a batch of none"):
            fl.answer(model, data, work)
