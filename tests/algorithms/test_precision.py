"""Models of low precision: the state moves by small amounts, and clients' states add up to the server's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import algorithms as fl
from algorithms import tree
from algorithms.conformance.federation import UNEVEN, Federation, Round, flat
from algorithms.precision import widened
from tests.marks import slow_except

LOW = [torch.bfloat16, torch.float16]


def lowered(federation: Federation, dtype: torch.dtype) -> Federation:
    """The same federation with a model of this dtype."""
    return replace(federation, x=tree.map(lambda x: x.to(dtype), federation.x))


@pytest.mark.parametrize(
    ("method", "dtype"),
    slow_except(
        product(("fedavg", "fedavgm", "fedadam", "slowmo", "feddemon"), LOW),
        ("fedavg", torch.float16),
        *((method, torch.bfloat16) for method in ("fedavgm", "fedadam", "slowmo", "feddemon")),
    ),
)
def test_small_deltas_add_up(method: str, dtype: torch.dtype) -> None:
    """200 deltas of 0.001 from x = 100 give the path of a float32 model that gets the same deltas."""
    algorithm = fl.build(method)
    low, high = (algorithm.init({"w": torch.full((3,), 100.0, dtype=kind)}) for kind in (dtype, torch.float32))
    delta = {"w": torch.full((3,), 0.001, dtype=dtype)}
    for t in range(200):
        info, cohort = fl.RoundInfo(t, 0.1, rounds=300), fl.UpdateInfo("a", 1, 1)
        low = fl.apply_updates(algorithm, low, [(cohort, delta)], info)
        high = fl.apply_updates(algorithm, high, [(cohort, widened(delta))], info)
    assert float(low.x["w"][0]) > 100.19
    for mine, other in ((low.x, high.x), *((low.memory[key], high.memory[key]) for key in high.memory)):
        assert mine["w"].dtype == torch.float32
        assert torch.equal(mine["w"], other["w"])


@pytest.mark.parametrize("method", fl.names())
def test_clients_get_the_model_s_dtype_and_send_it(conditioned: Federation, method: str) -> None:
    """The direction as sent and every payload are in bfloat16; sums and client states are in float32."""
    federation, algorithm = lowered(conditioned, torch.bfloat16), fl.build(method)
    standing = federation.start(algorithm)
    sums: dict[str, fl.Tensors] = {}
    for exchange in algorithm.exchanges:
        made = federation.answers(algorithm, standing, sums, Round())
        for context, update in made.values():
            sent = [context.direction or {}, *update.payloads.values()]
            assert {tensor.dtype for tensors in sent for tensor in tensors.values()} == {torch.bfloat16}
            kept = algorithm.next_client_state(context, update) if exchange.trains else {}
            states = [kept[symbol] for symbol in algorithm.client_init(federation.x)]  # a FedRobust map is not one
            assert {tensor.dtype for tensors in states for tensor in tensors.values()} <= {torch.float32}
        updates = [(client.info, made[client.name][1].payloads) for client in federation.clients]
        sums |= fl.sum_exchange(exchange, updates, federation.info(Round()))
    assert {tensor.dtype for tensors in sums.values() for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("method", "dtype"),
    slow_except(product(("scaffold", "feddyn"), LOW), ("scaffold", torch.bfloat16), ("feddyn", torch.float16)),
)
def test_client_states_add_up_to_the_server_s(conditioned: Federation, method: str, dtype: torch.dtype) -> None:
    """To the precision of float32, after 60 rounds of partial participation and a clip."""
    ours, theirs = {"scaffold": ("c", "c_i"), "feddyn": ("h", "h_i")}[method]
    federation, algorithm = lowered(conditioned, dtype), fl.build(method)
    rounds = [
        replace(UNEVEN[t % 6], t=t, rate=0.1, previous_rate=0.1, clip={conditioned.clients[0].name: 0.6})
        for t in range(60)
    ]
    standing = federation.run(algorithm, rounds)[-1]
    states = torch.stack([flat(standing.clients[client.name][theirs]) for client in federation.clients])
    assert states.abs().max() > 0.1
    torch.testing.assert_close(flat(standing.server.memory[ours]), states.mean(dim=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [fl.LocalRule(), fl.LocalRule(mu=0.5), fl.LocalRule(gradient=fl.GradientRule(0.05))])
def test_local_steps_shorter_than_the_precision_add_up(rule: fl.LocalRule) -> None:
    """Each of 200 steps from y = 1 is below half a step of bfloat16, 0.002; all together are the float32 path."""

    def moved(dtype: torch.dtype) -> fl.LocalResult:
        model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
        torch.nn.init.ones_(model.weight)
        batch = (torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype))
        loss = torch.nn.functional.mse_loss
        return fl.train_locally(model, [batch] * 200, loss, rule, fl.LocalSettings(0.0005))

    low, high = moved(torch.bfloat16), moved(torch.float32)
    assert low.delta["weight"].dtype == torch.bfloat16
    assert high.delta["weight"].item() < -0.1
    torch.testing.assert_close(low.delta["weight"].float(), high.delta["weight"], rtol=0.02, atol=0.0)


def test_a_model_is_loaded_from_a_server_state() -> None:
    """The float32 state is rounded to the nearest value of the model. Another dtype is refused."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    fl.load_state(model, fl.ModelState({"weight": torch.tensor([[1.001]])}, {}, {}))
    assert model.weight.item() == 1.0
    with pytest.raises(ValueError, match="expected bfloat16.1, 1., got float64"):
        fl.load_state(model, fl.ModelState({"weight": torch.ones(1, 1, dtype=torch.float64)}, {}, {}))


def test_other_precisions_are_not_copied() -> None:
    """A state of float32 or float64 is the tensors that it was made of."""
    for dtype in (torch.float32, torch.float64):
        x = {"w": torch.ones(3, dtype=dtype)}
        state = fl.build("fedcm").init(x)
        assert state.x["w"] is x["w"]
        assert state.as_sent(state.x) is state.x
        assert state.memory["Delta"]["w"].dtype == dtype
