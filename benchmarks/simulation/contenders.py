"""What is measured: the engines of `fl simulate`, and the other libraries."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import python_of
from benchmarks.simulation.setting import data_root
from benchmarks.simulation.stored import stored

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("cifar10.toml")
REQUIREMENTS = {"pfl": ["pfl==0.6.0"], "flower": ["flwr[simulation]==1.41.0"]}


@dataclass(frozen=True, slots=True)
class Options:
    """How all contenders run."""

    rounds: int
    processes: int
    """Of contenders that use several."""
    device: str
    environments: Path
    """The folder of the libraries' virtual environments."""


@dataclass(frozen=True, slots=True)
class Started:
    """A contender's command, and the table of rounds that it writes."""

    command: list[str]
    table: Path
    path: Path = ROOT
    """The working directory, and where Python finds our modules."""
    data: Path | None = None
    """The data folder, in place of the user's."""
    threads: int | None = None
    """torch threads of each process. None: the program chooses."""


Start = Callable[[Options, Path], Started]
"""(options, an empty folder) -> the command. Raises NotInstalled."""


def environment(started: Started) -> Mapping[str, str]:
    """A contender's variables. No library reports its use to its authors."""
    silent = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    threads = {} if started.threads is None else {"OMP_NUM_THREADS": str(started.threads)}
    data = {} if started.data is None else {"IMPETUS_DATA": str(started.data)}
    return {**os.environ, **silent, **threads, **data, "PYTHONPATH": str(started.path)}


def contenders(device: str) -> dict[str, Start]:
    """By name, in the order of the table. The engines "sequential" and "workers" train on the CPU for every device."""
    found = {
        "sequential": _ours(["--engine", "sequential"]),
        "workers": _ours(["--engine", "workers", "--workers", "{processes}"]),
        "batched": _ours(["--engine", "batched", "--device", device]),
    }
    # Libraries are installed with this torch's build from a package index, which borrowed GPUs do not reach.
    peers: dict[str, Start] = {"pfl, 1 process": _pfl, "pfl, processes": _pfl_processes, "flower": _flower}
    return {**found, **peers} if device == "cpu" else found


def _ours(engine: list[str]) -> Start:
    def start(options: Options, folder: Path) -> Started:
        config = folder / "run.toml"
        text, changes = re.subn(r"(?m)^rounds = \d+$", f"rounds = {options.rounds}", CONFIG.read_text(encoding="utf-8"))
        if changes != 1:
            raise ValueError(f"expected one line rounds = N in {CONFIG}, got {changes}")
        config.write_text(text, encoding="utf-8")
        chosen = [part.format(processes=options.processes) for part in engine]
        command = [sys.executable, "-m", "fl_ops", "simulate", str(config), "--out", str(folder), *chosen]
        return Started(command, folder / "seed-0" / "rounds.csv")

    return start


def _pfl(options: Options, folder: Path) -> Started:
    return _peer("pfl", ["benchmarks.simulation.peers.pfl_research"], options, folder)


def _pfl_processes(options: Options, folder: Path) -> Started:
    ranks = ["--standalone", "--nproc-per-node", str(options.processes)]
    module = ["torch.distributed.run", *ranks, "-m", "benchmarks.simulation.peers.pfl_research"]
    return _peer("pfl", module, options, folder)


def _flower(options: Options, folder: Path) -> Started:
    return _peer("flower", ["benchmarks.simulation.peers.flower"], options, folder)


def _peer(library: str, module: list[str], options: Options, folder: Path) -> Started:
    """A library's program. It sees this package alone, because benchmarks/__init__.py configures gRPC for ours."""
    table = folder / "rounds.csv"
    python = python_of(library, options.environments, REQUIREMENTS[library])
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "simulation").symlink_to(Path(__file__).parent)
    command = [str(python), "-m", *module, "--rounds", str(options.rounds), "--report", str(table)]
    # Two threads of torch that wait for each other are slower than one on a machine with other load.
    return Started(command, table, folder, threads=1, data=stored(data_root()))
