"""Client states as rows of tensors and as files: in memory or on disk, and gone at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fl_ops.simulate import held_states, run_files
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.run_files import ScratchFolder
from tests.fl_ops.simulate.conftest import Simulated

LOCKSTEP = EngineOptions(batched=BatchedOptions(strategy="grouped", group=2))
CLIPPED = {"clients_per_round": 2, "clip_update_norm": 0.05}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Folders in place of the one in memory and the one on disk."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(run_files, "MEMORY_DISK", memory)
    monkeypatch.setattr(run_files, "gettempdir", lambda: str(disk))
    return memory, disk


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_states_on_disk_have_the_same_bits(
    simulated: Simulated, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """States that do not fit in the share of the free memory are on disk; the models are the same."""
    found = []
    for share, place in ((run_files.MEMORY_SHARE, places[0]), (1e-15, places[1])):
        monkeypatch.setattr(run_files, "MEMORY_SHARE", share)
        with simulated(algorithm={"name": method}) as simulation:
            found.append([done.digest for done in simulation.rounds()])
            (folder,) = place.glob("fl-scratch-states-*")
            assert (
                {path.name for path in (folder / "state").iterdir()} == simulation.federation.states.clients() != set()
            )
        assert list(place.glob("*")) == []
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_states_in_memory_have_the_bits_of_files(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """States of clients in lockstep, with clipped updates: rows, files, and files of a save that rows replace."""
    found = []
    for share in (run_files.MEMORY_SHARE, 1e-15):
        monkeypatch.setattr(held_states, "MEMORY_SHARE", share)
        with simulated(LOCKSTEP, algorithm={"name": method}, round=CLIPPED) as simulation:
            digests, states = [done.digest for done in simulation.rounds()], simulation.federation.states
            kept = {client: states.path(client).read_bytes() for client in sorted(states.clients())}
        found.append((digests, kept))
    assert found[0] == found[1]
    folder = tmp_path / "kept"
    folder.mkdir()
    with simulated(LOCKSTEP, algorithm={"name": method}, round=CLIPPED) as simulation:
        states = simulation.federation.states
        for client, data in found[0][1].items():
            (folder / client).write_bytes(data)
            states.put(client, folder / client)
        list(simulation.rounds())
        assert states.changed <= states.clients() == set(found[0][1])
        states.remove_all()
        assert (states.clients(), states.get("c0")) == (set(), None)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_no_file(simulated: Simulated, places: tuple[Path, Path], error: type[BaseException]) -> None:
    """Updates and states are removed after an error or Ctrl-C in the middle of a round."""

    def stop(step: object) -> None:
        if getattr(step, "round", 0) == 2 and getattr(step, "number", 0) == 2:
            assert list(places[0].glob("*/state/*")) != []
            assert list(places[0].glob("*/next/at-one/*")) != []
            raise error

    with simulated(algorithm={"name": "scaffold"}) as simulation:
        simulation._notify = stop
        with pytest.raises(error):
            list(simulation.rounds())
    assert [*places[0].iterdir(), *places[1].iterdir()] == []


def test_folders_of_killed_processes_are_removed(places: tuple[Path, Path]) -> None:
    """A folder whose lock nobody holds goes with the next start; one in use and one that is new stay."""
    used = ScratchFolder("states", 0)
    for name in ("old", "new"):
        folder = places[0] / f"fl-scratch-{name}"
        folder.mkdir()
        (folder / ".in-use").touch()
    before = time.time() - 3600
    for folder in (used.path, places[0] / "fl-scratch-old"):
        os.utime(folder / ".in-use", (before, before))
    other = ScratchFolder("updates", 0)
    assert {path.name for path in places[0].iterdir()} == {used.path.name, other.path.name, "fl-scratch-new"}
    used.cleanup()
    other.cleanup()
    other.cleanup()
