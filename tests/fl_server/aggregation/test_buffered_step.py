"""Server steps over files of a buffer have the bits of the same step in memory, and without staleness of a round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import algorithms as fl
from algorithms.buffered import StaleDirection, apply_buffer
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import round_info
from fl_server.aggregation.server_update import staleness_rule
from fl_server.aggregation.snapshot import Snapshot
from fl_server.run_settings.spec import from_values
from protos.codec import pack

CLIENTS = {"a": (3, 2), "b": (5, 1), "c": (2, 4)}
"""Examples and steps."""


class Net(nn.Module):
    """A tensor of more than one block, two small ones, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(410, 400), nn.BatchNorm1d(3)


def engine(name: str, dtype: torch.dtype = torch.float32, stale_direction: str = "current") -> Engine:
    """An engine of a run with a buffer."""
    values = {
        "task": {"name": "net"},
        "algorithm": {"name": name},
        "local": {"learning_rate": 0.3, "learning_rate_decay": 0.9},
        "round": {
            "close": "buffer",
            "goal": 3,
            "staleness": {"kind": "polynomial", "exponent": 0.7},
            "stale_direction": stale_direction,
        },
    }
    return Engine(from_values(values), SimpleNamespace(model=lambda: Net().to(dtype)))


class Run:
    """A run with random updates, whose files stay."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.snapshots = [engine.first()]

    def payloads(self, client: str, version: int) -> Mapping[fl.Payload, fl.Tensors]:
        """What a client sends: the same each time."""
        generator = torch.Generator().manual_seed(1000 * version + ord(client))
        made = {}
        for shape in self.engine.shapes[0].payloads:
            values = {}
            for entry in shape.layout.entries:
                random = torch.rand(entry.shape, generator=generator) - 0.4
                values[entry.name] = (
                    (random * 10).to(entry.dtype) if entry.dtype == torch.int64 else random.to(entry.dtype)
                )
            made[shape.payload] = values
        return made

    def file(self, client: str, version: int) -> Path:
        """The file of these payloads."""
        path = self.folder / f"{client}-{version}"
        sent = self.payloads(client, version)
        path.write_bytes(b"".join(pack(sent[s.payload], s.layout) for s in self.engine.shapes[0].payloads))
        return path

    def entry(self, client: str, version: int) -> fl.Buffered:
        """An update of the current step."""
        examples, steps = CLIENTS[client]
        info = fl.UpdateInfo(client, examples, steps, 0.5 if client == "b" else 1.0)
        return fl.Buffered(info, version, len(self.snapshots) - 1 - version)

    def step(self, *keys: tuple[str, int]) -> Snapshot:
        """The next snapshot."""
        versions = {version: self.snapshots[version] for _, version in keys}
        made, _ = self.engine.buffered_update(
            self.snapshots[-1], [self.entry(*key) for key in keys], [self.file(*key) for key in keys], versions
        )
        self.snapshots.append(made)
        return made


def same(a: Snapshot, b: Snapshot) -> bool:
    """Whether model, buffers and memory have the same bits."""
    parts = [
        (a.state.x, b.state.x),
        (a.buffers, b.buffers),
        *((a.state.memory[s], b.state.memory[s]) for s in a.state.memory),
    ]
    return all(torch.equal(one[name], other[name]) for one, other in parts for name in one)


@pytest.mark.parametrize("name", ["fedavg", "fedcm", "mimelite", "fedadam", "mfl"])
def test_without_staleness_it_has_the_bits_of_a_round(name: str, tmp_path: Path) -> None:
    """Two steps of three fresh updates: `server_update` of the same cohort makes the same model, memory, statistics."""
    run = Run(engine(name), tmp_path)
    for version in range(2):
        before, keys = run.snapshots[-1], [(client, version) for client in "cab"]
        expected, _ = run.engine.server_update(
            before, [run.entry(c, version).info for c in "abc"], [run.file(c, version) for c in "abc"]
        )
        assert same(run.step(*keys), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "stale_direction"),
    [("fedavg", "current"), ("fedcm", "current"), ("fedcm", "sent"), ("mimelite", "current"), ("mfl", "current")],
)
def test_stale_updates_from_files_are_summed_as_in_memory(
    name: str, stale_direction: StaleDirection, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Blocks, groups of tensors and files change no bit of the mathematics; a client is there with two versions."""
    run = Run(engine(name, dtype, stale_direction), tmp_path)
    run.step(("a", 0), ("b", 0), ("c", 0))
    run.step(("a", 1), ("b", 1), ("c", 1))
    keys = [("c", 2), ("a", 0), ("b", 1), ("a", 2)]
    made = run.step(*keys)
    del run.snapshots[-1]
    config, algorithm = run.engine.config, run.engine.algorithm
    versions = {v: fl.Version(algorithm, round_info(config, v, len(keys))) for v in range(3)}
    directions = {v: algorithm.direction(run.snapshots[v].state) or {} for v in range(3)}
    trainable = set(run.snapshots[0].state.x)

    def sent(key: tuple[str, int]) -> dict[str, fl.Tensors]:
        return {p: {n: t for n, t in all_.items() if n in trainable} for p, all_ in run.payloads(*key).items()}

    updates = [(run.entry(*key), sent(key)) for key in keys]
    rule = staleness_rule(config)
    state = apply_buffer(
        versions, 2, run.snapshots[2].state, updates, directions, rule, stale_direction=stale_direction
    )
    for expected, found in [(state.x, made.state.x), *((state.memory[s], made.state.memory[s]) for s in state.memory)]:
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_order_of_arrival_changes_no_bit(tmp_path: Path) -> None:
    """The same set of updates, turned round."""
    run = Run(engine("fedcm"), tmp_path)
    run.step(("a", 0), ("b", 0), ("c", 0))
    keys = [("a", 0), ("b", 1), ("c", 0), ("a", 1)]
    one = run.step(*keys)
    del run.snapshots[-1]
    assert same(one, run.step(*reversed(keys)))


def test_statistics_are_a_mean_of_the_damped_updates(tmp_path: Path) -> None:
    """Weights n_i s_i / sum n s, which add up to one; counters are the largest."""
    run = Run(engine("fedavg"), tmp_path)
    run.step(("a", 0), ("b", 0), ("c", 0))
    made = run.step(("a", 0), ("b", 1))
    sent = [run.payloads("a", 0)["delta"], run.payloads("b", 1)["delta"]]
    s = 2**-0.7
    expected = (3 * s * sent[0]["norm.running_mean"] + 5 * sent[1]["norm.running_mean"]) / (3 * s + 5)
    torch.testing.assert_close(made.buffers["norm.running_mean"], expected)
    counters = [each["norm.num_batches_tracked"] for each in sent]
    assert made.buffers["norm.num_batches_tracked"] == max(counters)
