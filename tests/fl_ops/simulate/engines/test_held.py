"""Updates in the memory of the device: the same values as in files, and the same bits for any group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import algorithms as fl
from algorithms.base import ClientUpdate
from fl_client.training.payloads import PlacedPayload, laid_out
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.engines import batched, held
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.engines.held import DeviceMemory, HeldInMemory, sums_of_squares
from fl_server.admission.norms import digest_and_norms
from fl_server.aggregation.reduction import average_buffers, sum_updates
from fl_server.aggregation.updates import Source, UpdateShape
from protos.codec import pieces_of
from tests.fl_ops.simulate.conftest import Simulated
from tests.fl_ops.simulate.test_batched import UNEVEN, run
from tests.marks import slow_except

CPU = torch.device("cpu")
HELD = BatchedOptions(strategy="one_by_one", group=3)
FILES = BatchedOptions(strategy="one_by_one", group=3, holds_updates=False)


def update(seed: int) -> ClientUpdate:
    """Two payloads; the second one begins at an odd byte."""
    numbers = torch.Generator().manual_seed(seed)
    tensors = {
        "w": torch.randn(37, 5, generator=numbers),
        "s": torch.randn((), generator=numbers),
        "h": torch.randn(3, generator=numbers).to(torch.bfloat16),
        "none": torch.empty(0, 2),
    }
    buffers = {"mean": torch.randn(4, generator=numbers), "count": torch.tensor(seed), "flag": torch.tensor([True])}
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    return ClientUpdate({"delta": tensors, "control": wide}, buffers, 3, 0.1)


def stacked(count: int, first: int = 0) -> list[PlacedPayload]:
    """The payloads of so many updates, with a leading dimension of clients."""
    parts = [laid_out(update(seed)) for seed in range(first, first + count)]
    return [
        one._replace(tensors={name: torch.stack([part[i].tensors[name] for part in parts]) for name in one.tensors})
        for i, one in enumerate(parts[0])
    ]


def both(tmp_path: Path, count: int = 5) -> tuple[list[Path], list[HeldInMemory], UpdateShape]:
    """The same updates in files and in memory."""
    parts = [laid_out(update(seed)) for seed in range(count)]
    paths = [tmp_path / str(number) for number in range(count)]
    for path, each in zip(paths, parts, strict=True):
        path.write_bytes(b"".join(piece for part in each for piece in pieces_of(part.tensors, part.layout)))
    rows = DeviceMemory(CPU).hold(stacked(count))
    assert rows is not None
    delta, control = (part.layout for part in parts[0])
    return (
        paths,
        [rows.update(number) for number in range(count)],
        UpdateShape.of(("delta", "control"), delta, delta, {"control": control}),
    )


def test_the_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    """Also with gaps, an empty tensor, and a payload that begins at an odd byte."""
    paths, in_memory, shape = both(tmp_path)
    assert [bytes(each.data.tolist()) for each in in_memory] == [path.read_bytes() for path in paths]
    for path, each in zip(paths, in_memory, strict=True):
        assert each.squares == pytest.approx(digest_and_norms(path, shape.entries)[1], rel=1e-14)


@pytest.mark.parametrize("payload", ["delta", "control"])
def test_sums_have_the_bits_of_sums_over_files(tmp_path: Path, payload: str) -> None:
    """Of parameters and of buffers; also if only some of the updates are in memory."""
    paths, in_memory, shape = both(tmp_path)
    layout, rows = shape.layout_of(payload), [[0.1, 0.2, 0.3, 0.25, 0.15], [1.0, -2.0, 0.5, 0.0, 3.0]]
    expected, buffers = sum_updates(paths, layout, rows), average_buffers(paths, layout, rows[0])
    cases: list[list[Source]] = [[*in_memory], [*in_memory[:2], *paths[2:]]]
    for sources in cases:
        for one, other in zip(sum_updates(sources, layout, rows), expected, strict=True):
            same(one, other)
        same(average_buffers(sources, layout, rows[0]), buffers)


@pytest.mark.parametrize("wide_bytes", [8, 1 << 20])
def test_squares_do_not_depend_on_the_group(monkeypatch: pytest.MonkeyPatch, wide_bytes: int) -> None:
    """One update alone, and with four others, in one piece or several."""
    monkeypatch.setattr(held, "_WIDE_BYTES", wide_bytes)
    assert sums_of_squares(stacked(5)) == [sums_of_squares(stacked(1, seed))[0] for seed in range(5)]


def test_memory_counts_until_the_last_reference_is_gone() -> None:
    """Two groups do not fit; after the last update of the first one is gone, the second one does."""
    memory = DeviceMemory(CPU, 2 * sum(part.layout.size_bytes for part in stacked(1)))
    rows = memory.hold(stacked(2))
    assert rows is not None
    one = rows.update(1)
    del rows
    assert memory.hold(stacked(1)) is None
    del one
    assert memory.hold(stacked(2)) is not None


def same(one: fl.Tensors, other: fl.Tensors) -> None:
    """Equal names, dtypes and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name])


def digests(simulated: Simulated, options: BatchedOptions, **sections: Any) -> list[str | None]:
    """Of the models of three rounds."""
    return [each.digest for each in run(simulated, EngineOptions(batched=options), **sections)[0]]


@pytest.mark.parametrize("method", slow_except(fl.names(), "scaffold", "mime"))
def test_a_run_has_the_bits_of_one_with_files(simulated: Simulated, method: str) -> None:
    """Every method, with several exchanges and client states."""
    sections = {**UNEVEN, "algorithm": {"name": method}}
    assert digests(simulated, HELD, **sections) == digests(simulated, FILES, **sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"task": {"name": "points:NormedPoints"}, "round": {"clients_per_round": 4, "max_relative_payload": 50.0}},
        {"round": {"clients_per_round": 4, "quorum": 4, "reducer": "median"}},
        {"round": {"clients_per_round": 5, "quorum": 5, "reducer": "krum"}, "simulation": {"clients": 5}},
    ],
    ids=["buffers", "median", "krum"],
)
def test_buffers_and_robust_reducers(simulated: Simulated, sections: dict[str, Any]) -> None:
    """They read the updates in memory as they read files."""
    sections = {"local": {"learning_rate": 0.1, "batch_size": 5}, "algorithm": {"name": "fedavg"}, **sections}
    assert digests(simulated, HELD, **sections) == digests(simulated, FILES, **sections)


def test_clipping_and_limits_use_the_same_norms(simulated: Simulated) -> None:
    """Norms may differ in their last bits, and with them a clip factor: the model by its rounding at most."""
    sections = {**UNEVEN, "round": {"clients_per_round": 5, "clip_update_norm": 0.01}}
    before, after = (run(simulated, EngineOptions(batched=one), **sections)[1] for one in (FILES, HELD))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-7)


def test_the_size_of_groups_changes_no_bit_of_sums_and_norms(simulated: Simulated) -> None:
    """With one_by_one a client's update has the same bits in any group, so the models do too."""
    groups = (BatchedOptions(strategy="one_by_one", group=size) for size in (1, 2, 5))
    sections = {"round": {"clients_per_round": 4, "clip_update_norm": 0.01}}
    first, second, third = (digests(simulated, options, **sections) for options in groups)
    assert first == second == third


def test_an_update_that_is_not_finite_fails_its_client(simulated: Simulated) -> None:
    """The message is that of the other engines, and names the values."""
    unlimited = {"clients_per_round": 4, "max_relative_norm": 0.0, "max_relative_payload": 0.0}
    sections = {"local": {"learning_rate": 1e38, "batch_size": 8}, "round": unlimited}
    found = []
    for options in (HELD, FILES):
        with simulated(EngineOptions(batched=options), **sections) as simulation:
            list(simulation.rounds())
            found.append((simulation.ending, simulation.failures, simulation.diverged))
    assert found[0] == found[1]
    assert found[0][2]


def test_updates_that_do_not_fit_become_files(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group fits and the second one does not. The bits are the same, and the report counts the files."""
    expected = digests(simulated, HELD, **UNEVEN)
    with simulated(**UNEVEN) as simulation:
        size = simulation.federation.engine.shapes[0].size_bytes
    monkeypatch.setattr(batched, "DeviceMemory", lambda device: DeviceMemory(device, 3 * size))
    with simulated(EngineOptions(batched=HELD), **UNEVEN) as simulation:
        assert [each.digest for each in simulation.rounds()] == expected
        assert "cpu has no room for them: 6 updates" in simulation.federation.engine_report
