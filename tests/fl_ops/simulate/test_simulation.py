"""A simulated run: the results of its rounds, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_ops.simulate import run_files
from fl_ops.simulate.output.console import round_line
from fl_ops.simulate.simulation import Simulation
from fl_server.admission.gate import build_gate
from fl_tasks import Examples
from tests.fl_ops.simulate.conftest import Simulated

MODEL_BYTES = (4 * 3 + 3) * 4


def ending(simulation: Simulation) -> tuple[str, str]:
    """Status and reason of a run that has ended."""
    assert simulation.ending is not None
    return simulation.ending


def digests(simulated: Simulated, **sections: Any) -> list[str | None]:
    """Digest of the model after each round."""
    with simulated(**sections) as simulation:
        return [done.digest for done in simulation.rounds()]


def test_a_seed_decides_everything(simulated: Simulated) -> None:
    """The same seed gives the same models again; another seed gives others."""
    first = digests(simulated, seed=5)
    assert len(set(first)) == 3
    assert (first == digests(simulated, seed=5), first == digests(simulated, seed=6)) == (True, False)


def test_the_folder_of_updates_stays_locked(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a round its lock is left in it: without it, the folder of a killed process would never be removed."""
    monkeypatch.setattr(run_files, "MEMORY_DISK", tmp_path)
    with simulated() as simulation:
        next(simulation.rounds())
        [updates] = tmp_path.glob("*updates*")
        assert (updates / ".in-use").exists()
        assert not list((updates / "updates").iterdir())


def test_updates_are_admitted_with_one_thread(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """As training is, whatever this process is set to: more threads are slower for the norms of an update."""
    used: list[int] = []

    def recorded(*arguments: Any) -> Any:
        used.append(torch.get_num_threads())
        return build_gate(*arguments)

    monkeypatch.setattr("fl_ops.simulate.updates.build_gate", recorded)
    torch.set_num_threads(2)
    try:
        digests(simulated)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert used == [1] * 6


def test_a_round_has_its_clients_metrics_and_loss(simulated: Simulated) -> None:
    """Two of four clients by id, the metrics of the evaluation, and the loss of training."""
    with simulated(evaluation={"every": 2}) as simulation:
        rounds = list(simulation.rounds())
    assert [done.accepted == tuple(sorted(done.accepted)) and len(done.accepted) for done in rounds] == [2, 2, 2]
    assert [sorted(done.metrics) for done in rounds] == [[], ["accuracy", "loss"], ["accuracy", "loss"]]
    assert all(0 < (done.training_loss or 0) < 2 for done in rounds)


@pytest.mark.parametrize(
    ("algorithm", "down", "up"),
    [
        pytest.param("fedavg", 1, 1, id="model-down-delta-up"),
        pytest.param("fedcm", 2, 1, id="direction-and-model"),
        pytest.param("mimelite", 2, 2, id="two-payloads"),
        pytest.param("mime", 2, 2, id="two-exchanges-one-model"),
    ],
)
def test_bytes_are_those_of_the_wire(simulated: Simulated, algorithm: str, down: int, up: int) -> None:
    """A model of 15 float32 is 60 bytes; in two exchanges it is fetched once, as a daemon does."""
    with simulated(algorithm={"name": algorithm}) as simulation:
        last = list(simulation.rounds())[-1]
    assert (last.bytes_down, last.bytes_up) == (2 * down * MODEL_BYTES, 2 * up * MODEL_BYTES)


def test_clients_evaluate_on_their_own_part(simulated: Simulated) -> None:
    """Every second round and after the last, all four clients evaluate the model on their held-out data."""
    sections = {"task": {"options": {"part": 0.25}}, "evaluation": {"every": 0, "clients_every": 2}}
    with simulated(**sections) as simulation:
        rounds = list(simulation.rounds())
    assert [done.metrics.get("clients_evaluated") for done in rounds] == [None, 4.0, 4.0]
    assert 0 <= rounds[1].metrics["clients_accuracy_worst_decile"] <= rounds[1].metrics["clients_accuracy_mean"] <= 1


def test_the_clients_evaluations_can_end_a_run(simulated: Simulated) -> None:
    """A target for a metric of the clients is compared with their evaluations."""
    stop = {"metric": "clients_accuracy", "target": 0.01}
    sections = {"task": {"options": {"part": 0.25}}, "evaluation": {"clients_every": 1}}
    with simulated(**sections, stop=stop) as simulation:
        assert len(list(simulation.rounds())) == 1
        assert "clients_accuracy reached" in ending(simulation)[1]


def test_it_ends_by_its_rounds(simulated: Simulated) -> None:
    """The reason is the number of rounds, and the last model has its state_dict names."""
    with simulated() as simulation:
        assert simulation.ending is None
        list(simulation.rounds())
        assert ending(simulation) == ("completed", "3 rounds are done")
        assert {name: tuple(tensor.shape) for name, tensor in simulation.model().items()} == {
            "weight": (3, 4),
            "bias": (3,),
        }


def test_it_ends_at_its_target(simulated: Simulated) -> None:
    """A target that the first evaluation reaches ends the run after that round, as the coordinator would."""
    with simulated(stop={"rounds": 3, "metric": "accuracy", "target": 0.01}) as simulation:
        assert len(list(simulation.rounds())) == 1
        assert ending(simulation)[0] == "completed"
        assert "accuracy reached" in ending(simulation)[1]


def test_it_ends_at_its_time_limit(simulated: Simulated) -> None:
    """A limit of nearly no time ends the run before its first round."""
    with simulated(stop={"wall_time_s": 1e-9}) as simulation:
        assert list(simulation.rounds()) == []
        assert ending(simulation) == ("completed", "its 1e-09 s are over")


def test_a_diverging_aggregate_leaves_the_last_good_model(simulated: Simulated) -> None:
    """Finite updates with an infinite sum fail the run. The model before stays. By default they are refused."""
    with simulated(local={"learning_rate": 1e38}, round={"max_relative_norm": 0.0}) as simulation:
        first = simulation.federation.digest
        assert list(simulation.rounds()) == []
        assert (ending(simulation)[0], simulation.federation.digest) == ("failed", first)
        assert "not finite" in ending(simulation)[1]
        assert simulation.diverged
        assert all(torch.isfinite(tensor).all() for tensor in simulation.model().values())


def test_clients_that_diverge_fail_the_run(simulated: Simulated) -> None:
    """If no client delivers a finite update, no client is left to draw: the run fails with the last reason."""
    with simulated(local={"learning_rate": 3e38, "weight_decay": 10.0}) as simulation:
        list(simulation.rounds())
        assert ending(simulation)[0] == "failed"
        assert "expected a finite" in ending(simulation)[1]
        assert simulation.diverged


def test_updates_over_the_limit_are_refused(simulated: Simulated) -> None:
    """All updates are refused: the run fails with the coordinator's reason."""
    with simulated(round={"max_update_norm": 1e-9}) as simulation:
        assert list(simulation.rounds()) == []
        assert "expected an update of norm 1e-09 at most" in ending(simulation)[1]
        assert not simulation.diverged


@pytest.mark.parametrize(
    ("scale", "limits"),
    [(1e6, {}), (1e30, {}), (1e30, {"max_relative_norm": 0.0})],
    ids=["too-long", "overflow", "overflow-without-limits"],
)
def test_a_client_that_spoils_a_round_is_excluded(simulated: Simulated, scale: float, limits: dict[str, float]) -> None:
    """A client with much larger inputs: the models equal those of a run in which this client cannot train."""
    lines: list[str] = []

    def run_with(scale: float) -> tuple[list[tuple[tuple[str, ...], str | None]], list[str]]:
        round_ = {"clients_per_round": 4, "quorum": 2, **limits}
        sections = {"algorithm": {"name": "fedavg"}, "round": round_, "local": {"steps": 1}}
        with simulated(**sections) as simulation:
            honest = simulation.federation.clients["c3"]
        train: Any = honest.train
        scaled = replace(honest, train=Examples(train.inputs * scale, train.targets))
        with simulated(**sections, replaced={"c3": scaled}) as simulation:
            rounds = [*simulation.rounds()]
            lines.append(rounds[0].why_short)
            return [(done.accepted, done.digest) for done in rounds], simulation.failures

    rounds, failures = run_with(scale)
    assert [accepted for accepted, _ in rounds] == [("c0", "c1", "c2")] * 3
    assert rounds == run_with(float("nan"))[0]
    assert "norm" in failures[0]
    assert "round 0 has 3 of 4 updates: 1 refused; 1 of them: update refused: " in lines[0]


def test_a_short_round_says_why(simulated: Simulated) -> None:
    """The line of a round with fewer updates than it wants has the coordinator's words for those that are missing."""
    five = {"round": {"clients_per_round": 5}, "simulation": {"clients": 5}}
    with simulated(**five) as simulation:
        whole = next(simulation.rounds())
        clients = simulation.federation.clients
    train: Any = clients["c1"].train
    replaced = {"c1": replace(clients["c1"], train=Examples(train.inputs * float("nan"), train.targets))}
    with simulated(**five, replaced=replaced) as simulation:
        done = list(simulation.rounds())
        why = simulation.failures[0].removeprefix("round 0, c1: ")
    assert [one.why_short for one in done] == [
        f"round {n} has 4 of 5 updates: 1 failed; 1 of them: {why}" for n in range(3)
    ]
    assert round_line(done[0]).endswith(f" up; {done[0].why_short}")
    assert (whole.why_short, "has" in round_line(whole)) == ("", False)


def test_one_of_five_is_no_round(simulated: Simulated) -> None:
    """Four clients have labels that are floats, out of range or probabilities, or inputs that are NaN: no commit."""
    five = {"round": {"clients_per_round": 5}, "simulation": {"clients": 5}}
    with simulated(**five) as simulation:
        clients = simulation.federation.clients
    train: Any = clients["c0"].train
    count, classes = len(train.targets), int(train.targets.max()) + 1
    broken = {
        "c1": Examples(train.inputs, train.targets.float()),
        "c2": Examples(train.inputs, train.targets + 100),
        "c3": Examples(train.inputs, torch.full((count, classes + 7), 0.5)),
        "c4": Examples(train.inputs * float("nan"), train.targets),
    }
    replaced = {name: replace(clients[name], train=data) for name, data in broken.items()}
    with simulated(**five, replaced=replaced) as simulation:
        assert list(simulation.rounds()) == []
        assert ending(simulation)[0] == "failed"
        assert len(simulation.failures) == 4


def test_an_error_on_every_client_fails_the_run_with_its_line(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the coordinator decides it: after the first attempt, with type, message, file and line."""
    with simulated(round={"clients_per_round": 3}) as simulation:
        task = simulation.federation.clients["c0"].task
        ages: dict[str, torch.Tensor] = {}
        monkeypatch.setattr(type(task), "loss", lambda self, output, target: ages["age"])
        assert list(simulation.rounds()) == []
        status, reason = ending(simulation)
    assert (status, len(simulation.failures)) == ("failed", 3)
    assert reason.startswith("3 clients failed in round 0 with the same error in the task's code, and 0 delivered")
    assert "KeyError: 'age' (" in reason
    assert "test_simulation.py, line " in reason


def test_too_few_clients(simulated: Simulated) -> None:
    """A run that would wait for more clients forever fails at once."""
    with simulated(round={"clients_per_round": 5}) as simulation:
        assert list(simulation.rounds()) == []
        assert ending(simulation) == ("failed", "expected 5 clients or more, there are 4")


def test_over_selection_takes_the_first_arrivals(simulated: Simulated) -> None:
    """Of three drawn clients two are accepted and the third does not train; the first arrivals are random."""
    goal = {"close": "goal", "over_selection": 1.5}
    with simulated(round=goal, stop={"rounds": 20}) as simulation:
        rounds = list(simulation.rounds())
    assert {done.dropped for done in rounds} == {1}
    assert {done.bytes_up for done in rounds} == {2 * MODEL_BYTES}
    assert any("c3" in done.accepted for done in rounds)


def test_bernoulli_cohorts(simulated: Simulated) -> None:
    """Cohorts of different sizes, none empty."""
    with simulated(round={"sampling": "bernoulli", "rate": 0.5}, stop={"rounds": 12}) as simulation:
        sizes = [len(done.accepted) for done in simulation.rounds()]
    assert min(sizes) >= 1
    assert len(set(sizes)) > 1


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_the_population_is_known(simulated: Simulated, algorithm: str) -> None:
    """Methods that need N get it from [simulation]; the file does not have to set it."""
    with simulated(algorithm={"name": algorithm}) as simulation:
        assert len(list(simulation.rounds())) == 3
        assert simulation.config.population == 4
