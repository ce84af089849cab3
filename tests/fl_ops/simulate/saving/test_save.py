"""A run that was saved and continued in a new simulation is the run without the stop, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import algorithms as fl
from fl_ops.errors import Refused, UsageError
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.saving import save as saving
from fl_ops.simulate.saving.save import RunSave, pause
from fl_ops.simulate.simulation import Simulation
from tests.fl_ops.simulate.conftest import Simulated, continued
from tests.marks import slow_except

SETTINGS = {"run": {"seed": 0, "rate": 0.1}}
BASE: dict[str, Any] = {
    "task": {"name": "points:NormedPoints"},
    "local": {"learning_rate": 0.05, "batch_size": 6},
    "round": {"clients_per_round": 3},
    "stop": {"rounds": 6},
    "simulation": {"clients": 5},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": {"name": name}} for name in fl.names()},
    "bfloat16": {"task": {"name": "points:LowPoints"}, "algorithm": {"name": "fedadam"}},
    "goal": {"round": {"close": "goal", "over_selection": 1.5}},
    "bernoulli": {"round": {"sampling": "bernoulli", "rate": 0.5}},
    "relative-clip": {"round": {"max_relative_norm": 1.0, "over_relative_norm": "clip"}},
    "clip-of-states": {
        "algorithm": {"name": "scaffold"},
        "round": {"max_relative_norm": 1.0, "over_relative_norm": "clip"},
    },
    "personal": {"personal": ["4.weight"]},
    "clients-evaluate": {"task": {"options": {"part": 0.25}}, "evaluation": {"clients_every": 1}},
    "clients-evaluate-averaged": {
        "task": {"options": {"part": 0.25}},
        "averaging": {"method": "window", "window": 2},
        "evaluation": {"clients_every": 1, "averaged_on_clients": True},
    },
    "patience": {"stop": {"rounds": 30, "metric": "loss", "patience": 3}, "local": {"learning_rate": 3.0}},
    "simulated-time": {
        "task": {"options": {"part": 0.25}},
        "round": {"close": "goal", "quorum": 2},
        "evaluation": {"clients_every": 1},
        "simulation": {"system": {"speed": 10, "down": 500, "drop_out": 0.2, "availability": {"on_s": 60, "off_s": 9}}},
    },
    "decay": {"local": {"learning_rate_decay": 0.9}},
    "differences": {"encodings": {"model": "bf16", "difference": "previous"}},
}


def table(sections: dict[str, Any]) -> dict[str, Any]:
    """The settings of a case."""
    changed = {name: {**BASE.get(name, {}), **values} for name, values in sections.items() if isinstance(values, dict)}
    return {**BASE, **{name: values for name, values in sections.items() if name not in changed}, **changed}


@contextmanager
def opened(simulated: Simulated, folder: Path, every_s: Any = 0.0, **sections: Any) -> Iterator[tuple[Any, RunSave]]:
    """A simulation and its save."""
    with simulated(**table(sections)) as simulation, RunSave(folder, SETTINGS, every_s) as save:
        yield simulation, save


def play(simulation: Simulation, save: RunSave, most: int = 1000) -> list[RoundResult]:
    """The results until there are so many, without their times. The run is saved when it stops."""
    found: list[RoundResult] = []
    rounds = continued(simulation, save)
    while len(found) < most and (one := next(rounds, None)) is not None:
        found.append(replace(one, seconds=0.0))
    rounds.close()  # type: ignore[attr-defined]  # a generator
    return found


def refuses(save: RunSave, simulation: Simulation, message: str) -> bool:
    """Whether the save cannot be continued for this reason."""
    with pytest.raises(Refused, match=message):
        save.restore(simulation)
    return True


def same(one: Simulation, other: Simulation) -> bool:
    """Whether ending, failures, models, server memory and client states are equal."""
    states = [
        {client: (it.federation.states.path(client)).read_bytes() for client in it.federation.states.clients()}
        for it in (one, other)
    ]
    memories = [dict(it.snapshot.state.memory) for it in (one, other)]
    torch.testing.assert_close(memories[0], memories[1], rtol=0, atol=0)
    return (
        (one.ending, one.failures, states[0]) == (other.ending, other.failures, states[1])
        and one.federation.digest == other.federation.digest
        and one.federation.point.norms.to_text() == other.federation.point.norms.to_text()
        and one.federation.point.held == other.federation.point.held
    )


def test_a_run_with_a_buffer_is_saved_at_its_end(simulated: Simulated, tmp_path: Path) -> None:
    """Stopped after a step it begins anew, for clients are at work then; once it has ended, its results are read."""
    sections = {"round": {"close": "buffer", "goal": 2, "concurrency": 3, "clients_per_round": 2}}
    with opened(simulated, tmp_path, **sections) as (first, save):
        [begun] = play(first, save, 1)
    with opened(simulated, tmp_path, **sections) as (second, save):
        every = play(second, save)
    assert every[0] == begun
    assert every[-1].versions
    with opened(simulated, tmp_path, **sections) as (third, save):
        assert play(third, save) == every
        assert third.ending == second.ending


@pytest.mark.parametrize("name", slow_except(CASES, "scaffold"))
def test_a_continued_run_has_the_bits_of_one_without_a_stop(simulated: Simulated, tmp_path: Path, name: str) -> None:
    """Three rounds, a new simulation, one round, a new simulation, and the rest: results, models, states and ending."""
    with simulated(**table(CASES[name])) as whole:
        expected = [replace(one, seconds=0.0) for one in whole.rounds()]
        for most in (3, 4):
            with opened(simulated, tmp_path / "saved", **CASES[name]) as (simulation, save):
                assert play(simulation, save, most) == expected[:most]
        with opened(simulated, tmp_path / "saved", **CASES[name]) as (simulation, save):
            assert play(simulation, save) == expected
            assert same(simulation, whole)
    assert len(expected) > 4


@pytest.mark.parametrize("name", slow_except(["fedcm", "scaffold"], "scaffold"))
def test_an_ended_run_continues_with_nothing(simulated: Simulated, tmp_path: Path, name: str) -> None:
    """Its results, its model and the reason of its end are there; its client states are not kept."""
    sections: dict[str, Any] = {"algorithm": {"name": name}}
    with opened(simulated, tmp_path / "saved", **sections) as (first, save):
        expected = play(first, save)
    assert list((tmp_path / "saved" / "states").iterdir()) == []
    with opened(simulated, tmp_path / "saved", **sections) as (second, save):
        assert play(second, save) == expected
        assert (second.ending, second.federation.digest) == (first.ending, first.federation.digest)


def test_a_run_that_failed_before_its_first_commit_stays_failed(simulated: Simulated, tmp_path: Path) -> None:
    """The reason is that of the first process."""
    endings = []
    for _ in range(2):
        with opened(simulated, tmp_path / "saved", round={"clients_per_round": 9}) as (simulation, save):
            assert play(simulation, save) == []
            endings.append(simulation.ending)
    assert endings[0] == endings[1] == ("failed", "expected 9 clients or more, there are 5")


def test_the_time_limit_counts_earlier_processes(simulated: Simulated, tmp_path: Path) -> None:
    """A run that had used its time when it was saved ends at once."""
    stop = {"stop": {"rounds": 1000, "wall_time_s": 3600.0}}
    with opened(simulated, tmp_path / "saved", every_s=60.0, **stop) as (simulation, save):
        rounds = save.rounds(simulation)
        next(rounds)
        simulation.point = replace(simulation.point, seconds=3600.0)
        rounds.close()
    with opened(simulated, tmp_path / "saved", **stop) as (simulation, save):
        assert len(play(simulation, save)) == 1
        assert simulation.ending == ("completed", "its 3600 s are over")


def test_a_save_writes_only_the_states_that_changed(simulated: Simulated, tmp_path: Path) -> None:
    """After two rounds of three among five clients, the files of the first are those of clients not in the second."""
    with opened(simulated, tmp_path / "saved", algorithm={"name": "scaffold"}) as (simulation, save):
        first, second = play(simulation, save, 2)
        names = sorted(path.name for path in (tmp_path / "saved" / "states").iterdir())
    old = [f"000000-{client}" for client in first.accepted if client not in second.accepted]
    assert names == sorted([*old, *(f"000001-{client}" for client in second.accepted)])


def test_saves_are_made_at_times(simulated: Simulated, tmp_path: Path) -> None:
    """With a long time between saves only the end of the iteration writes one."""
    with opened(simulated, tmp_path / "saved", every_s=3600.0) as (simulation, save):
        rounds = save.rounds(simulation)
        next(rounds), next(rounds)
        assert list((tmp_path / "saved").glob("run-*/round-*")) == []
        rounds.close()
    assert [path.name for path in (tmp_path / "saved").glob("run-*/round-*")] == ["round-000001"]


@pytest.mark.parametrize(("every_s", "took_s", "expected"), [(30.0, 1.0, 30.0), (30.0, 10.0, 200.0), (0.0, 9.0, 0.0)])
def test_saves_take_a_twentieth_of_the_time_at_most(every_s: float, took_s: float, expected: float) -> None:
    """A save of 10 s is made every 200 s. Without a time between saves, every round is saved."""
    assert pause(every_s, took_s) == expected


def test_a_new_run_does_not_remove_one_that_was_stopped(simulated: Simulated, tmp_path: Path) -> None:
    """The error names --continue. A save of a run that has ended is removed."""
    with opened(simulated, tmp_path / "saved") as (simulation, save):
        play(simulation, save, 2)
        with pytest.raises(UsageError, match=r"stopped after round 1: continue it with --continue, or remove"):
            save.begin()
    with opened(simulated, tmp_path / "saved") as (simulation, save):
        play(simulation, save)
        save.begin()
    with opened(simulated, tmp_path / "saved") as (simulation, save):
        assert save.restore(simulation) == []


def test_other_settings_are_refused(simulated: Simulated, tmp_path: Path) -> None:
    """The message has the name and both values of each setting that differs."""
    with opened(simulated, tmp_path / "saved") as (simulation, save):
        play(simulation, save, 2)
    other = {"run": {"seed": 0, "rate": 0.2, "new": True}}
    expected = r"run\.rate was 0\.1 and is 0\.2; run\.new was None and is True\. Use the"
    with simulated(**BASE) as simulation, RunSave(tmp_path / "saved", other) as save:
        assert refuses(save, simulation, expected)


def test_another_program_is_refused(simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed line of code could change the bits."""
    with opened(simulated, tmp_path / "saved") as (simulation, save):
        play(simulation, save, 2)
    monkeypatch.setattr(saving, "program_digest", lambda: "sha256:other")
    with opened(simulated, tmp_path / "saved") as (simulation, save):
        assert refuses(save, simulation, r"program was 'sha256:[0-9a-f]{64}' and is 'sha256:other'")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("states/*", "has a damaged client state"),
        ("rounds.jsonl", "was changed or cut"),
        ("run-*/round-*/model.safetensors", "is damaged: remove the folder"),
    ],
)
def test_a_damaged_save_is_refused(simulated: Simulated, tmp_path: Path, file: str, message: str) -> None:
    """One changed byte in a state, in the results or in the model is found before the run continues."""
    sections: dict[str, Any] = {"algorithm": {"name": "scaffold"}}
    with opened(simulated, tmp_path / "saved", **sections) as (simulation, save):
        play(simulation, save, 2)
    path = next((tmp_path / "saved").glob(file))
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with opened(simulated, tmp_path / "saved", **sections) as (simulation, save):
        assert refuses(save, simulation, message)


def test_one_process_at_a_time(simulated: Simulated, tmp_path: Path) -> None:
    """A second use of the folder is refused."""
    with opened(simulated, tmp_path / "saved"), pytest.raises(Refused, match="another process uses"):
        RunSave(tmp_path / "saved", SETTINGS)


@pytest.mark.parametrize("stage", slow_except(["before", "after"], "before"))
def test_a_save_that_does_not_finish_leaves_the_one_before(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The process ends before or after the checkpoint's rename, when the states and results of round 3 are written."""
    sections: dict[str, Any] = {"algorithm": {"name": "scaffold"}}
    with simulated(**table(sections)) as whole:
        expected = [replace(one, seconds=0.0) for one in whole.rounds()]
    with opened(simulated, tmp_path / "saved", **sections) as (simulation, save):
        play(simulation, save, 2)
    with opened(simulated, tmp_path / "saved", **sections) as (simulation, save):
        write = save._checkpoints.save

        def end(*arguments: Any) -> None:
            if stage == "after":
                write(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(save._checkpoints, "save", end)
        with pytest.raises(KeyboardInterrupt):
            play(simulation, save, 4)
    with opened(simulated, tmp_path / "saved", **sections) as (simulation, save):
        assert len(save.restore(simulation)) == (2 if stage == "before" else 3)
    with opened(simulated, tmp_path / "saved", **sections) as (simulation, save):
        assert play(simulation, save) == expected
        assert sorted(path.name for path in (tmp_path / "saved").glob("run-*/*")) == ["round-000005"]
