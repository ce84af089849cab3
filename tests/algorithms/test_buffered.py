"""Steps over a buffer: without staleness a synchronous round, with it what the formulas say, written out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import algorithms as fl
from algorithms.buffered import Buffered, StaleDirection, Version, apply_buffer, refusal
from algorithms.conformance.federation import UNEVEN, Federation, Round, RunState, flat
from algorithms.optimizers.federated import with_optimizer
from algorithms.optimizers.spec import OptimizerSpec
from algorithms.staleness import Staleness, build_staleness
from tests.algorithms.optimum import minimiser
from tests.marks import slow_except

REFUSED = {"scaffold", "feddyn", "fedrobust", "proxskip", "mime"}
SOUND = [name for name in fl.names() if name not in REFUSED]
STALE = (((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 0), (2, 1)), ((2, 2), (0, 0)), ((1, 3), (1, 1), (0, 3)))
"""The (client, version) of four buffers."""
HALF = build_staleness("polynomial", exponent=0.5)


@dataclass
class Run:
    """An asynchronous run of small problems: the server's state of every version."""

    federation: Federation
    algorithm: fl.Algorithm
    staleness: Staleness = HALF
    stale_direction: StaleDirection = "current"
    decay: float = 0.9
    """Of the rate, from version to version."""
    states: list[fl.ServerState] = field(default_factory=list)
    sent: dict[tuple[int, int], fl.Tensors] = field(default_factory=dict)
    """The deltas of the buffers so far, by client and version."""

    def __post_init__(self) -> None:
        self.states.append(self.algorithm.init(self.federation.x))

    def round_of(self, version: int, size: int) -> Round:
        """The round with a version's number."""
        before = 0.1 * self.decay ** (version - 1) if version else None
        return Round(version, range(size), 0.1 * self.decay**version, before)

    def update(self, client: int, version: int) -> tuple[Buffered, Mapping[fl.Payload, fl.Tensors]]:
        """What a client sends for a version."""
        at = Round(version, [client], self.round_of(version, 1).rate)
        [(_, made)] = self.federation.answers(self.algorithm, RunState(self.states[version]), {}, at).values()
        self.sent[client, version] = made.payloads["delta"]
        return Buffered(self.federation.clients[client].info, version, len(self.states) - 1 - version), made.payloads

    def step(self, buffer: Sequence[tuple[int, int]]) -> fl.ServerState:
        """The next version."""
        current = len(self.states) - 1
        numbers = {current, *(version for _, version in buffer)}
        infos = {v: self.federation.info(self.round_of(v, len(buffer))) for v in numbers}
        versions = {v: Version(self.algorithm, info) for v, info in infos.items()}
        sent = {v: self.algorithm.direction(self.states[v]) for v in versions}
        directions = {v: direction for v, direction in sent.items() if direction is not None}
        updates = [self.update(client, version) for client, version in buffer]
        of = self.stale_direction
        made = apply_buffer(versions, current, self.states[-1], updates, directions, self.staleness, stale_direction=of)
        self.states.append(made)
        return made

    def play(self, buffers: Sequence[Sequence[tuple[int, int]]] = STALE) -> Tensor:
        """x after some steps."""
        for buffer in buffers:
            self.step(buffer)
        return flat(self.states[-1].x)


@pytest.mark.parametrize("stale_direction", ["current", "sent"])
@pytest.mark.parametrize("name", slow_except(SOUND, "fedavg", "fedcm", "mimelite", "qg"))
def test_without_staleness_it_is_the_synchronous_round(
    federation: Federation, name: str, stale_direction: StaleDirection
) -> None:
    """The same bits of model and memory after six rounds, with unequal work, partial cohorts and a decaying rate."""
    algorithm = fl.build(name)
    run = Run(federation, algorithm, stale_direction=stale_direction)
    expected = federation.run(algorithm, UNEVEN)
    for round, standing in zip(UNEVEN, expected, strict=True):
        made = run.step([(client, round.t) for client in round.cohort])
        assert torch.equal(flat(made.x), flat(standing.server.x))
        for symbol, kept in standing.server.memory.items():
            assert torch.equal(flat(made.memory[symbol]), flat(kept)), symbol


@pytest.mark.parametrize("name", slow_except(SOUND, "fedcm"))
def test_the_result_depends_on_the_set_alone(federation: Federation, name: str) -> None:
    """Buffers in another order make the same bits."""
    forwards, backwards = (Run(federation, fl.build(name)) for _ in range(2))
    turned = [tuple(reversed(buffer)) for buffer in STALE]
    assert torch.equal(forwards.play(), backwards.play(turned))


def test_fedavg_adds_the_damped_mean(federation: Federation) -> None:
    """x + (1 / |B|) sum s_i delta_i, with s = (1 + staleness)^-1/2: divided by the number of updates alone."""
    run = Run(federation, fl.build("fedavg", weights="uniform"))
    for buffer in STALE:
        before, current = flat(run.states[-1].x), len(run.states) - 1
        after = flat(run.step(buffer).x)
        terms = [(1 + current - v) ** -0.5 * flat(run.sent[client, v]) for client, v in buffer]
        torch.testing.assert_close(after, before + sum(terms) / len(buffer), rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 0.6])
def test_fedcm_uses_what_the_clients_learnt(federation: Federation, alpha: float) -> None:
    """x + mean(s r) - eta Kbar (1 - alpha) Delta_v and (1 - alpha) Delta_v - sum(s r / (eta K)) / sum(s)."""
    run = Run(federation, fl.build("fedcm", alpha=alpha))
    for buffer in STALE:
        v, state = len(run.states) - 1, run.states[-1]
        x, Delta = flat(state.x), flat(state.memory["Delta"])
        made = run.step(buffer)
        moved, learnt, total = torch.zeros(3).double(), torch.zeros(3).double(), 0.0
        for client, version in buffer:
            K, eta, s = federation.clients[client].steps, 0.1 * 0.9**version, (1 + v - version) ** -0.5
            own = flat(run.states[version].memory["Delta"])
            r = flat(run.sent[client, version]) + eta * K * (1 - alpha) * own
            moved += (s * r - 0.1 * 0.9**v * K * (1 - alpha) * Delta) / len(buffer)
            learnt, total = learnt + s * r / (eta * K), total + s
        torch.testing.assert_close(flat(made.x), x + moved, rtol=0, atol=1e-12)
        expected = (1 - alpha) * Delta - learnt / total
        torch.testing.assert_close(flat(made.memory["Delta"]), expected, rtol=0, atol=1e-12)


def test_with_sent_directions_fedcm_averages_the_deltas(federation: Federation) -> None:
    """x + mean(s delta) and -sum(s delta / (eta K)) / sum(s)."""
    run = Run(federation, fl.build("fedcm", alpha=0.1), stale_direction="sent")
    for buffer in STALE:
        v, x = len(run.states) - 1, flat(run.states[-1].x)
        made = run.step(buffer)
        moved, mean, total = torch.zeros(3).double(), torch.zeros(3).double(), 0.0
        for client, version in buffer:
            K, eta, s = federation.clients[client].steps, 0.1 * 0.9**version, (1 + v - version) ** -0.5
            delta = flat(run.sent[client, version])
            moved, mean, total = moved + s * delta / len(buffer), mean - s * delta / (eta * K), total + s
        torch.testing.assert_close(flat(made.x), x + moved, rtol=0, atol=1e-12)
        torch.testing.assert_close(flat(made.memory["Delta"]), mean / total, rtol=0, atol=1e-12)


def still(federation: Federation) -> Federation:
    """The same clients with gradients of zero everywhere: they learn nothing."""
    zero = [type(client)(client.name, client.A * 0, client.b * 0, client.steps) for client in federation.clients]
    return type(federation)(zero, federation.x, federation.settings)


KIN: list[tuple[str, dict[str, Any], str, float]] = [
    ("fedcm", {"alpha": 0.1}, "Delta", 0.9),
    ("mofedsam", {"beta": 0.1}, "Delta", 0.9),
    ("qg", {"beta": 0.9, "mu": 0.5}, "mhat", 0.5 + 0.5 * 0.9),
    ("mimelite", {"beta": 0.9}, "m", 0.9),
    ("mfl", {"gamma": 0.9}, "u", 0.0),
]


@pytest.mark.parametrize(("name", "parameters", "symbol", "kept"), KIN, ids=[case[0] for case in KIN])
def test_clients_that_learnt_nothing_say_nothing_of_old_directions(
    federation: Federation, name: str, parameters: dict[str, Any], symbol: str, kept: float
) -> None:
    """With gradients of zero, memory and movement are of the current direction; with "sent" of old ones."""
    algorithm = fl.build(name, **parameters)
    runs = []
    stale_directions: tuple[StaleDirection, ...] = ("current", "sent")
    for stale_direction in stale_directions:
        run = Run(still(federation.with_steps(3)), algorithm, stale_direction=stale_direction)
        for value in (1.0, -2.0):  # two versions with different directions
            start = run.states[0]
            filled = {own: {key: t * 0 + value for key, t in start.x.items()} for own in start.memory}
            run.states.append(start.replace(memory=filled))
        run.step([(0, 1), (1, 2), (2, 1)])
        runs.append(run)
    sound, sent_run = runs
    fresh = Run(still(federation.with_steps(3)), algorithm)
    fresh.states[:] = sound.states[:3]
    fresh.step([(0, 2), (1, 2), (2, 2)])
    torch.testing.assert_close(flat(sound.states[-1].x), flat(fresh.states[-1].x), rtol=0, atol=1e-12)
    assert (flat(sent_run.states[-1].x) - flat(fresh.states[-1].x)).norm() > 1e-2
    if kept:
        after = flat(sound.states[-1].memory[symbol])
        torch.testing.assert_close(after, torch.full_like(after, -2.0 * kept), rtol=0, atol=1e-12)


def test_a_stale_buffer_converges_for_fedcm(conditioned: Federation) -> None:
    """Updates that are always two versions old, of single steps: it comes to the minimiser."""
    run = Run(conditioned.with_steps(1), fl.build("fedcm", alpha=0.2), decay=1.0)
    x = run.play([[(client, max(0, v - 2)) for client in range(3)] for v in range(400)])
    torch.testing.assert_close(x, minimiser(conditioned), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("scaffold", "keep a state"),
        ("feddyn", "keep a state"),
        ("fedrobust", "keep a state"),
        ("proxskip", "keep a state"),
        ("mime", "two exchanges"),
    ],
)
def test_refused_methods_have_a_reason(name: str, why: str) -> None:
    """What cannot step over a buffer says why; each other method of the package can."""
    assert why in refusal(fl.build(name))
    assert {method for method in fl.names() if refusal(fl.build(method))} == REFUSED


def test_other_local_optimizers_go_with_methods_without_a_direction_only() -> None:
    """AdamW's steps are not linear in FedCM's direction; FedAvg sends none; a state on the device is a client state."""
    adamw = OptimizerSpec("adamw")
    assert "linear" in refusal(with_optimizer(fl.build("fedcm"), adamw))
    assert not refusal(with_optimizer(fl.build("fedavg"), adamw))
    assert "keep a state" in refusal(with_optimizer(fl.build("fedavg"), OptimizerSpec("adamw", state="device")))


def test_two_updates_of_one_client_and_version_are_refused(federation: Federation) -> None:
    """They would be the same bytes; of two versions they are two updates."""
    run = Run(federation, fl.build("fedavg"))
    with pytest.raises(ValueError, match="one update of each client and version"):
        run.step([(0, 0), (0, 0)])
    run.step([(0, 0), (1, 0)])
    run.step([(0, 0), (0, 1)])
