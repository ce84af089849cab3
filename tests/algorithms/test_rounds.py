"""`run_round`: a whole round of any method as one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import algorithms as fl
from algorithms import tree
from algorithms.conformance.federation import UNEVEN, Client, Federation, flat, half_squares
from tests.algorithms.optimum import minimiser
from tests.marks import slow_except


def participant(client: Client) -> fl.Participant:
    """The client for `run_round`."""
    return fl.Participant(client.name, len(client.A), lambda exchange: client.data(client.A))


def play(federation: Federation, algorithm: fl.Algorithm) -> fl.RunState:
    """UNEVEN's rounds, with the cohorts in reverse order."""
    model = federation.model(federation.x)
    state = fl.start_run(algorithm, model)
    for round in UNEVEN:
        cohort = [participant(federation.clients[i]) for i in reversed(list(round.cohort))]
        info = federation.info(round)
        state = fl.run_round(algorithm, state, model, cohort, fl.LocalSettings(info.learning_rate), info).state
    return state


@pytest.mark.parametrize("name", fl.names())
def test_it_has_the_bits_of_the_parts(federation: Federation, name: str) -> None:
    """For every method the state of server and clients is that of its exchanges, sums and steps made one by one."""
    algorithm = fl.build(name)
    whole, parts = play(federation, algorithm), federation.run(algorithm, UNEVEN)[-1]
    assert torch.equal(flat(whole.server.x), flat(parts.server.x))
    torch.testing.assert_close(dict(whole.server.memory), dict(parts.server.memory), rtol=0, atol=0)
    kept = {client: memory for client, memory in parts.clients.items() if memory}
    torch.testing.assert_close(dict(whole.clients), kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "option"),
    slow_except(
        [("scaffold", "I"), ("scaffold", "II"), ("feddyn", None), ("mime", None)], ("scaffold", "I"), ("feddyn", None)
    ),
)
def test_it_reaches_the_exact_optimum(conditioned: Federation, name: str, option: str | None) -> None:
    """The corrected methods end at the minimiser of the mean, although the clients' steps drift."""
    parameters: dict[str, Any] = {"option": option} if option else {"beta": 0.5} if name == "mime" else {"alpha": 1.0}
    algorithm, model = fl.build(name, **parameters), conditioned.model(conditioned.x)
    state, clients = fl.start_run(algorithm, model), [participant(client) for client in conditioned.clients]
    for t in range(100):
        info = fl.RoundInfo(t, 0.2, population=3)
        state = fl.run_round(algorithm, state, model, clients, fl.LocalSettings(0.2), info).state
    torch.testing.assert_close(flat(state.server.x), minimiser(conditioned), rtol=0, atol=1e-9)


def test_buffers_are_averaged_and_counters_kept() -> None:
    """Running statistics are the weighted mean of the clients' ones; the number of batches is the largest."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    fedavg = fl.build("fedavg")

    def client(name: str, value: float, steps: int) -> fl.Participant:
        batch = torch.full((4, 2), value), torch.zeros(4)
        return fl.Participant(name, 4 * steps, lambda exchange: fl.LocalData([batch] * steps, [batch], half_squares))

    start = fl.start_run(fedavg, model)
    info, settings = fl.RoundInfo(0, 0.1), fl.LocalSettings(0.1)
    result = fl.run_round(fedavg, start, model, [client("a", 10.0, 1), client("b", 20.0, 3)], settings, info)
    after = result.state.buffers
    b = 20.0 * (1 - 0.9**3)
    torch.testing.assert_close(after["0.running_mean"], torch.full((2,), 0.25 * 1.0 + 0.75 * b))
    assert after["0.num_batches_tracked"].item() == 3
    assert start.buffers["0.num_batches_tracked"].item() == 0
    assert result.losses.keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("names", "rate", "expected"),
    [
        ([], 0.1, "expected at least one participant, got none"),
        (["ada", "bob", "ada"], 0.1, "expected each client once, got ada more than once"),
        (["ada"], 0.2, "expected one learning rate .*, got 0.2 and 0.1"),
    ],
)
def test_bad_cohorts_are_refused(federation: Federation, names: Sequence[str], rate: float, expected: str) -> None:
    """No client, one client twice, and two learning rates; nothing is trained."""
    fedavg, model = fl.build("fedavg"), federation.model(federation.x)
    by_name = {client.name: participant(client) for client in federation.clients}
    state = fl.start_run(fedavg, model)
    with pytest.raises(ValueError, match=expected):
        fl.run_round(
            fedavg, state, model, [by_name[name] for name in names], fl.LocalSettings(rate), fl.RoundInfo(0, 0.1)
        )
    assert torch.equal(flat(fl.read_state(model).trainable), flat(federation.x))


def test_a_missing_fact_is_named(federation: Federation) -> None:
    """SCAFFOLD without N."""
    scaffold, model = fl.build("scaffold"), federation.model(federation.x)
    cohort = [participant(federation.clients[0])]
    with pytest.raises(ValueError, match="needs population, over 0, in every round's RoundInfo"):
        fl.run_round(
            scaffold, fl.start_run(scaffold, model), model, cohort, fl.LocalSettings(0.1), fl.RoundInfo(0, 0.1)
        )


# A method of one's own, with a payload that no module of the package names.


def sign_correction(*, payload: str = "sign", made_of: tuple[str, ...] = ("delta",)) -> fl.Correction:
    """signSGD with majority vote: clients send sign(delta), and the server moves by the sign of the sum."""

    def signs(client: fl.ClientContext, update: fl.ClientUpdate) -> fl.Tensors:
        return tree.map(torch.sign, update.payloads[made_of[0]])

    def votes(
        p: tuple[float, ...], cohort: Sequence[fl.UpdateInfo], round_info: fl.RoundInfo
    ) -> Mapping[str, fl.WeightedSum]:
        return {"votes": fl.WeightedSum((1.0,) * len(cohort), "sign")}

    def advance(
        memory: fl.Memory, sums: Mapping[str, fl.Tensors], round_info: fl.RoundInfo
    ) -> tuple[fl.Tensors, fl.Memory]:
        return tree.map(torch.sign, sums["votes"]), memory

    return fl.Correction(
        payloads=("sign",), computed={payload: fl.ComputedPayload(made_of, signs)}, sums=votes, advance=advance
    )


def test_a_method_names_its_own_payload(federation: Federation) -> None:
    """Three clients vote on each entry; each entry moves by exactly 1 in the direction of most deltas."""
    own = fl.compose("sign", {}, fl.Components(sign_correction(), "uniform"))
    model = federation.model(federation.x)
    plain = fl.build("fedavg")
    deltas = [flat(delta) for _, delta in federation.deltas(plain, plain.init(federation.x))]
    assert (own.exchanges[0].trains, own.exchanges[0].passes) == (True, False)
    state = fl.run_round(
        own, fl.start_run(own, model), model, [participant(client) for client in federation.clients],
        fl.LocalSettings(0.1), fl.RoundInfo(0, 0.1),
    ).state  # fmt: skip
    votes = torch.stack(deltas).sign().sum(0).sign()
    assert torch.equal(flat(state.server.x) - flat(federation.x), votes)


@pytest.mark.parametrize(
    "correction",
    [sign_correction(payload="signs"), sign_correction(made_of=("gradient",))],
    ids=["no-rule", "made-of-unknown"],
)
def test_a_payload_without_a_rule_is_refused(correction: fl.Correction) -> None:
    """When the method is composed, not in a client's training."""
    with pytest.raises(fl.AlgorithmError, match="expected the basic payloads delta, full_gradient, client_momentum"):
        fl.compose("sign", {}, fl.Components(correction, "uniform"))


def test_a_method_without_local_momentum_cannot_send_it(federation: Federation) -> None:
    """The client refuses, and names the payload."""
    own = fl.compose("own", {}, fl.Components(fl.Correction(payloads=("delta", "client_momentum")), "uniform"))
    work = fl.Work(own, fl.ClientContext(), federation.settings)
    client = federation.clients[0]
    with pytest.raises(fl.AlgorithmError, match="cannot compute the payload 'client_momentum'"):
        fl.answer(federation.model(federation.x), replace(client).data(client.A), work)
