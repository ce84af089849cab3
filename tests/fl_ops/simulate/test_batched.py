"""The batched engine: whole runs in lockstep beside the sequential engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import algorithms as fl
from algorithms.batched import training
from algorithms.batched.choice import WrongStrategy
from algorithms.batched.client import Updates, answer_together
from algorithms.batched.members import Members
from algorithms.batched.strategies import Name
from algorithms.batched.training import Training
from fl_ops.errors import Refused, UsageError
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions, EngineRequest
from fl_ops.simulate.engines import batched, groups, pool
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.places import place_held_out
from fl_ops.simulate.reports import RoundResult
from fl_tasks import Examples
from tests.fl_ops.simulate.conftest import Simulated
from tests.marks import slow_except

BATCHED = EngineOptions(batched=BatchedOptions(strategy="grouped", group=3))
UNEVEN: dict[str, Any] = {
    "task": {"name": "points:Points", "options": {"part": 0.2}},
    "round": {"clients_per_round": 5},
    "local": {"learning_rate": 0.2, "batch_size": 8, "epochs": 2, "max_gradient_norm": 1.0, "weight_decay": 0.001},
    "simulation": {"clients": 6, "partition": {"method": "dirichlet", "alpha": 0.6}},
    "evaluation": {"every": 1, "clients_every": 1},
}
"""Clients of different sizes, in groups of three and two, which evaluate too."""


def run(
    simulated: Simulated, engine: EngineOptions, **sections: Any
) -> tuple[list[RoundResult], dict[str, torch.Tensor]]:
    """The rounds and the last model."""
    with simulated(engine, **sections) as simulation:
        rounds = list(simulation.rounds())
        assert simulation.ending is not None
        assert simulation.ending[0] == "completed", simulation.failures
        return rounds, simulation.model()


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||a|| of two models."""
    a, b = (torch.cat([tensor.double().flatten() for tensor in each.values()]) for each in (one, other))
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("method", slow_except(fl.names(), "mime"))
def test_a_run_is_that_of_the_sequential_engine(simulated: Simulated, method: str) -> None:
    """Three rounds of every method, with client states and clients' evaluations; the same clients count."""
    sections = {**UNEVEN, "algorithm": {"name": method}}
    (alone, before), (together, after) = run(simulated, SEQUENTIAL, **sections), run(simulated, BATCHED, **sections)
    assert difference(before, after) < 1e-5
    assert [each.accepted for each in alone] == [each.accepted for each in together]
    assert (alone[-1].bytes_down, alone[-1].bytes_up) == (together[-1].bytes_down, together[-1].bytes_up)
    for one, other in zip(alone, together, strict=True):
        assert other.training_loss == pytest.approx(one.training_loss, rel=1e-5)
        assert other.metrics["clients_loss_mean"] == pytest.approx(one.metrics["clients_loss_mean"], rel=1e-5)


@pytest.mark.parametrize("method", slow_except(fl.names(), "scaffold"))
def test_digests_change_nothing_else(simulated: Simulated, method: str) -> None:
    """Without digests nothing is packed: the same models, metrics and bytes, and no result has a digest."""
    found = []
    for digests in (True, False):
        sections = {**UNEVEN, "algorithm": {"name": method}, "simulation": {"clients": 6, "digests": digests}}
        with simulated(BATCHED, **sections) as simulation:
            rounds = list(simulation.rounds())
            found.append([replace(row, digest=None, seconds=0.0) for row in rounds])
            assert [row.digest is not None for row in rounds] == [digests] * 3
            last = simulation.federation.digest
    assert found[0] == found[1]
    assert last == run(simulated, BATCHED, **{**sections, "simulation": {"clients": 6}})[0][-1].digest


@pytest.mark.parametrize("task", ["points:NormedPoints", "points:LowPoints"])
def test_batch_norm_dropout_and_low_precision(simulated: Simulated, task: str) -> None:
    """Buffers and dropout masks are each client's; a model of bfloat16 differs by its own rounding at most."""
    # Batches of 5 leave no client a batch of one, which batch norm refuses.
    sections = {"task": {"name": task}, "local": {"learning_rate": 0.1, "batch_size": 5}, "simulation": {"clients": 4}}
    before, after = (run(simulated, engine, **sections)[1] for engine in (SEQUENTIAL, BATCHED))
    assert difference(before, after) < (1e-5 if task == "points:NormedPoints" else 1e-2)


@pytest.mark.parametrize(
    ("precision", "tolerance"), slow_except([("float32", 1e-5), ("float64", 1e-12)], ("float64", 1e-12))
)
@pytest.mark.parametrize("method", slow_except(["fedcm", "scaffold", "mime"], "scaffold"))
def test_bytes_are_augmented_for_all_clients_at_once(
    simulated: Simulated, method: str, precision: str, tolerance: float
) -> None:
    """Clients of different sizes with random numbers of their own: the run is that of the sequential engine."""
    task = {"name": "pictures:Pictures", "options": {"precision": precision}}
    sections = {**UNEVEN, "task": task, "algorithm": {"name": method}, "evaluation": {"every": 1}}
    (alone, before), (together, after) = run(simulated, SEQUENTIAL, **sections), run(simulated, BATCHED, **sections)
    assert difference(before, after) < tolerance
    assert alone[-1].metrics == pytest.approx(together[-1].metrics, rel=1e-5)


def test_the_same_groups_have_the_same_bits(simulated: Simulated) -> None:
    """Two runs with one strategy and one size of groups have equal digests."""
    first, second = (run(simulated, BATCHED, **UNEVEN)[0] for _ in range(2))
    assert [each.digest for each in first] == [each.digest for each in second]


def test_a_measured_run_reports_its_choice(simulated: Simulated) -> None:
    """Without a named strategy and a size of groups both are chosen at the start."""
    with simulated(EngineOptions(batched=BatchedOptions()), **UNEVEN) as simulation:
        assert simulation.federation.engine_report == ""
        list(simulation.rounds())
        assert "groups of at most 64 clients" in simulation.federation.engine_report
        assert "ms a step" in simulation.federation.engine_report


def test_code_that_runs_client_by_client_is_reported(simulated: Simulated) -> None:
    """Optimizers with a state on the device are objects of each client; the report says it with the reason."""
    local = {"learning_rate": 0.05, "batch_size": 8, "optimizer": {"name": "adam", "state": "device"}}
    with simulated(BATCHED, algorithm={"name": "fedavg"}, local=local) as simulation:
        list(simulation.rounds())
        assert "the method's code runs client by client (" in simulation.federation.engine_report


@pytest.mark.parametrize("strategy", ["grouped", "one_by_one"])
def test_bfloat16_changes_the_precision_of_passes(simulated: Simulated, strategy: Name) -> None:
    """Models after three rounds differ from those without by the rounding of bfloat16: some 1e-4 of their norm.

    Parameters stay float32.
    """
    options = BatchedOptions(strategy=strategy, group=3)
    lower = replace(options, precision="bfloat16")
    before, after = (run(simulated, EngineOptions(batched=each), **UNEVEN)[1] for each in (options, lower))
    assert 1e-5 < difference(before, after) < 1e-2
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert EngineOptions(batched=lower).arithmetic["precision"] == "bfloat16"


def test_work_that_cannot_be_grouped_is_done_one_by_one(simulated: Simulated) -> None:
    """Personal parameters: the bits are those of the sequential engine, and the report names the reason."""
    alone, _ = run(simulated, SEQUENTIAL, personal=["bias"])
    with simulated(BATCHED, personal=["bias"]) as simulation:
        together = list(simulation.rounds())
        assert "trained one after the other (personal parameters: bias)" in simulation.federation.engine_report
    assert [each.digest for each in alone] == [each.digest for each in together]


def test_a_strategy_that_cannot_compute_the_model_is_refused(simulated: Simulated) -> None:
    """A strategy by name is not replaced by another one; the error names it, and the reason."""
    with (
        simulated(BATCHED, task={"name": "points:ReadPoints"}) as simulation,
        pytest.raises(WrongStrategy, match="--strategy grouped: .*item"),
    ):
        list(simulation.rounds())


def test_a_client_with_an_error_fails_alone(simulated: Simulated) -> None:
    """A group whose data raises an error is done one client after the other: only the client with the error fails."""
    with simulated(SEQUENTIAL) as other:
        local = other.federation.clients["c1"]
    assert isinstance(local.train, Examples)

    def broken(images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no augmentation of {len(images)} examples")

    bad = replace(local, train=replace(local.train, augment=broken))
    sections = {"round": {"clients_per_round": 4, "quorum": 3}}
    with simulated(BATCHED, {"c1": bad}, **sections) as simulation:
        rounds = list(simulation.rounds())
        assert [each.accepted for each in rounds] == [("c0", "c2", "c3")] * 3
        assert "no augmentation" in simulation.failures[-1]
        assert "one after the other" in simulation.federation.engine_report or not simulation.federation.engine_report


def test_a_client_whose_values_are_not_finite_fails_alone(simulated: Simulated) -> None:
    """The others of its group count, each with its own next state: the model is that of the sequential engine."""
    found = []
    for engine in (SEQUENTIAL, BATCHED):
        with simulated(SEQUENTIAL) as other:
            local = other.federation.clients["c1"]
        assert isinstance(local.train, Examples)
        bad = replace(local, train=replace(local.train, inputs=local.train.inputs * float("nan")))
        sections = {"algorithm": {"name": "scaffold"}, "round": {"clients_per_round": 4, "quorum": 3}}
        with simulated(engine, {"c1": bad}, **sections) as simulation:
            rounds = list(simulation.rounds())
            assert [each.accepted for each in rounds] == [("c0", "c2", "c3")] * 3
            assert "expected a finite training loss" in simulation.failures[-1]
            assert simulation.federation.states.clients() == {"c0", "c2", "c3"}
            found.append(simulation.model())
    assert difference(*found) < 1e-5


def test_a_group_that_runs_out_of_memory_is_halved(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of more than two clients fail here. All clients count, and later groups are small from the start."""
    sizes = []

    def limited(model: torch.nn.Module, members: Members, training: Training) -> Updates:
        sizes.append(len(members.steps))
        if len(members.steps) > 2:
            raise torch.OutOfMemoryError("no memory for more than two clients")
        return answer_together(model, members, training)

    monkeypatch.setattr(batched, "answer_together", limited)
    engine = EngineOptions(batched=BatchedOptions(strategy="grouped", group=4))
    rounds, _ = run(simulated, engine, round={"clients_per_round": 4})
    assert [len(each.accepted) for each in rounds] == [4, 4, 4]
    assert sizes == [4, 2, 2, 2, 2, 2, 2]


def test_the_size_of_groups_follows_the_memory_of_a_recorded_step(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step of four clients took 400 bytes: of 200 free ones and these 400, half is for three clients."""
    reserved = iter([1000, 1400])
    monkeypatch.setattr(training, "SHORT_S", math.inf)
    monkeypatch.setattr(training, "reserved_bytes", lambda device: next(reserved, 1400))
    monkeypatch.setattr(groups, "free_bytes", lambda device: 200)
    sections = {"round": {"clients_per_round": 4}, "local": {"learning_rate": 0.1, "batch_size": 10}}
    with simulated(EngineOptions(batched=BatchedOptions(strategy="grouped")), **sections) as simulation:
        assert len(list(simulation.rounds())) == 3
        assert simulation.federation.engine_report.startswith("lockstep: groups of at most 3 clients")


def test_data_that_does_not_fit_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what was needed, what is free, and what to do."""
    monkeypatch.setattr(pool, "free_bytes", lambda device: 2**30)
    examples = Examples(torch.zeros(1).expand(2**30), torch.zeros(1).expand(2**30))
    with pytest.raises(Refused, match=r"--device cuda: .* 8.0 GiB, got 1.0 GiB free: .*--engine workers"):
        pool._moved(examples, torch.device("cuda"))


def test_held_out_data_that_does_not_fit_beside_the_clients_is_an_error(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them fits alone: the error is that of the clients' data, with both sizes."""
    with simulated() as simulation:
        server, clients = simulation.federation.engine, simulation.federation.clients
    large = Examples(torch.zeros(1).expand(2**28), torch.zeros(1).expand(2**28))
    monkeypatch.setattr(server.model.in_process, "read_held_out", lambda: large)
    monkeypatch.setattr(SimulatedClients, "whole", large)
    monkeypatch.setattr(pool, "free_bytes", lambda device: 3 * 2**30)
    needed = "the examples of all clients, 2.0 GiB and the server's held-out examples, 2.0 GiB, got 3.0 GiB free: "
    with pytest.raises(Refused, match=f"--device cuda: expected room for {needed}"):
        place_held_out(server, clients, EngineOptions(batched=BatchedOptions(torch.device("cuda"))))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EngineRequest("sequential", device="cpu"), "--device: expected --engine batched"),
        (EngineRequest("batched", precision="tf32"), "--precision tf32: expected --device cuda, got cpu"),
        (EngineRequest("workers", precision="tf32"), "--precision: expected --engine batched"),
        (EngineRequest("workers", group=3), "--group: expected --engine batched"),
        (EngineRequest("batched", workers=2), "leave out --workers"),
        (EngineRequest("sequential", workers=2), "expected --engine workers"),
        (EngineRequest(device="tpu"), "expected cpu, cuda"),
        (EngineRequest(device="cuda:99"), "--device cuda:99: expected device 99"),
    ],
)
def test_options_that_do_not_go_together(request_: EngineRequest, message: str) -> None:
    """The error names the option, and what to do."""
    with pytest.raises(UsageError, match=message):
        request_.options()


def test_a_replay_needs_the_bits_of_a_coordinator() -> None:
    """Lockstep has other roundings, so a replay with it would always differ."""
    with pytest.raises(UsageError, match="--replay"):
        EngineRequest("batched").options(replays=True)
