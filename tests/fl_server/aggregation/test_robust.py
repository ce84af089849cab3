"""Robust reducers: the bits of the mean where updates agree, and no effect of a single poisoned update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import algorithms as fl
from algorithms import tree
from algorithms.reducers.robust import trimmed_mean
from fl_server.aggregation import reduction
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.reduction import centre_updates
from fl_server.aggregation.server_update import ServerUpdateStats
from fl_server.aggregation.snapshot import Snapshot
from fl_server.errors import InvalidInput
from fl_tasks import load_task
from protos.codec import Layout, LayoutError, pack
from tests.fl_server.harness import TASK, World, run_config

Reducer = Mapping[str, Any]
"""Keys of the round section."""
NAMES = ("A", "B", "a", "b", "c")
REDUCERS: list[Reducer] = [
    {"reducer": "median"},
    {"reducer": "trimmed_mean", "trim": 0.2},
    {"reducer": "krum", "krum_byzantine": 1, "krum_keep": 2},
]
with_each_reducer = pytest.mark.parametrize("reducer", REDUCERS, ids=lambda reducer: reducer["reducer"])


MEDIAN_OF_3 = partial(trimmed_mean, cut=1)


def engine(
    algorithm: str = "fedcm", model: str = "batchnorm", parameters: Mapping[str, object] | None = None, **reducer: Any
) -> Engine:
    """The engine of a run with five clients a round."""
    config = run_config(
        task={"name": TASK, "options": {"model": model}},
        algorithm={"name": algorithm, "parameters": parameters or {}},
        round={"clients_per_round": 5, "quorum": 5, **reducer},
    )
    return Engine(config, load_task(config.task.name, config.task.options))


def honest(engine: Engine, spread: float) -> list[fl.Tensors]:
    """Five updates with entries around 0.1, with buffers."""
    generator, first = torch.Generator().manual_seed(3), engine.first()
    created = []
    for _ in NAMES:
        delta = {
            name: 0.1 + spread * (torch.rand(x.shape, generator=generator) - 0.5) for name, x in first.state.x.items()
        }
        created.append({**delta, **{name: x + 1 for name, x in first.buffers.items()}})
    return created


def server_update(
    engine: Engine,
    updates: Sequence[fl.Tensors],
    folder: Path,
    steps: Sequence[int] = (2, 2, 2, 2, 2),
    start: Snapshot | None = None,
) -> tuple[Snapshot, ServerUpdateStats]:
    """The snapshot after a round with these updates, and the statistics of the server update."""
    cohort = [fl.UpdateInfo(name, 3 + 4 * at, k) for at, (name, k) in enumerate(zip(NAMES, steps, strict=True))]
    paths = [folder / f"u{name}" for name in NAMES]
    payloads = engine.algorithm.exchanges[-1].payloads
    for path, update in zip(paths, updates, strict=True):
        trained = {name: update[name] for name in engine.first().state.x}
        rest = b"".join(bytes(pack(trained, Layout.of(trained, trained.keys()))) for _ in payloads[1:])
        path.write_bytes(bytes(pack(update, engine.layout)) + rest)
    return engine.server_update(start or engine.first(), cohort, paths)


def same(first: Snapshot, second: Snapshot, ulps: int = 0) -> None:
    """Equal bits in model and buffers. The momentum may differ by this many units in the last place."""
    for one, other in ((first.state.x, second.state.x), (first.buffers, second.buffers)):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert list(first.state.memory) == list(second.state.memory)
    rtol = ulps * torch.finfo(torch.float32).eps
    for symbol, tensors in first.state.memory.items():
        torch.testing.assert_close(dict(tensors), dict(second.state.memory[symbol]), rtol=rtol, atol=0.0)


@with_each_reducer
@pytest.mark.parametrize(
    ("algorithm", "parameters", "ulps"),
    [
        pytest.param("fedavg", {}, 0, marks=pytest.mark.slow),
        pytest.param("fedcm", {}, 0, marks=pytest.mark.slow),
        ("fedcm", {"weights": "examples"}, 1),
        pytest.param("fedavgm", {"weights": "examples"}, 0, marks=pytest.mark.slow),
        pytest.param("qg", {}, 1, marks=pytest.mark.slow),
        ("fedadam", {}, 0),
    ],
)
def test_equal_updates_give_the_bits_of_the_mean(
    tmp_path: Path, algorithm: str, parameters: Mapping[str, object] | None, ulps: int, reducer: Reducer
) -> None:
    """Two rounds: for any weights, a centre of equal values is their mean.

    A momentum in units of a gradient is 5 delta, which may lie half-way between two float32, and the weights need not
    sum to one in their last bit: there the mean itself may be rounded either way.
    """
    results = []
    mean: Reducer = {}
    for each in (mean, reducer):
        run = engine(algorithm, parameters=parameters, **each)
        update = honest(run, spread=1.0)[0]
        snapshot, _ = server_update(run, [update] * 5, tmp_path)
        results.append(server_update(run, [update] * 5, tmp_path, start=snapshot)[0])
    same(results[0], results[1], ulps=ulps)


@pytest.mark.parametrize("reducer", REDUCERS[:2], ids=["median", "trimmed_mean"])
def test_other_payloads_than_the_delta_are_centred_too(tmp_path: Path, reducer: Reducer) -> None:
    """MimeLite's momentum consists of gradients: equal ones give the bits of the mean, and a bad one has no effect."""
    plain, run = engine("mimelite"), engine("mimelite", **reducer)
    update = honest(run, spread=1.0)[0]
    bad = {name: -1000 * value for name, value in update.items()}
    expected, _ = server_update(plain, [update] * 5, tmp_path)
    same(server_update(run, [update] * 5, tmp_path)[0], expected)
    result, _ = server_update(run, [bad, *[update] * 4], tmp_path)
    torch.testing.assert_close(dict(result.state.memory["m"]), dict(expected.state.memory["m"]))


def bounds(updates: Sequence[fl.Tensors], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest value of each entry, with a margin for float32's rounding of x + movement."""
    values = torch.stack([update[name] for update in updates])
    return values.amin(0) - 1e-6, values.amax(0) + 1e-6


def poisoned(updates: Sequence[fl.Tensors], at: int) -> list[fl.Tensors]:
    """The updates, one of them multiplied by -1000."""
    return [
        {name: -1000 * value if value.is_floating_point() else value for name, value in update.items()}
        if index == at
        else update
        for index, update in enumerate(updates)
    ]


@pytest.mark.parametrize("at", [0, 4])
@with_each_reducer
def test_one_poisoned_update_has_no_effect(tmp_path: Path, reducer: Reducer, at: int) -> None:
    """Every entry of movement and momentum stays between those of the four honest updates."""
    run = engine(model="plain", **reducer)
    updates = honest(run, spread=0.02)
    result, _ = server_update(run, poisoned(updates, at), tmp_path)
    good = [update for index, update in enumerate(updates) if index != at]
    for name, x in run.first().state.x.items():
        low, high = bounds(good, name)
        movement = result.state.x[name] - x
        assert bool(((low <= movement) & (movement <= high)).all())
        # Delta = - delta / (eta_l K) with eta_l = 0.1 and K = 2.
        estimate = -0.2 * result.state.memory["Delta"][name]
        assert bool(((low <= estimate) & (estimate <= high)).all())


def test_the_mean_follows_a_poisoned_update(tmp_path: Path) -> None:
    """Of four values near 0.1 and one near -100 the mean is near -20."""
    run = engine(model="plain")
    result, _ = server_update(run, poisoned(honest(run, spread=0.02), 0), tmp_path)
    for name, x in run.first().state.x.items():
        assert bool((result.state.x[name] - x < -15).all())


def test_the_clients_left_out_are_reported(tmp_path: Path) -> None:
    """Krum keeps two of five, and the poisoned one is among the three left out. The median leaves none out."""
    run = engine(model="plain", reducer="krum", krum_keep=2)
    _, norms = server_update(run, poisoned(honest(run, spread=0.02), 2), tmp_path)
    assert (len(norms.left_out), "a" in norms.left_out) == (3, True)
    assert server_update(engine(model="plain", reducer="median"), honest(run, 0.02), tmp_path)[1].left_out == ()


@with_each_reducer
@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_buffer_of_one_client_has_no_effect(tmp_path: Path, reducer: Reducer, sign: int) -> None:
    """The client's delta is normal; floating buffers and counters are huge. Four honest clients have x + 1 to x + 4."""
    run = engine(**reducer)
    updates, first = honest(run, spread=0.02), run.first().buffers
    for at, update in enumerate(updates):
        huge = {torch.float32: sign * 1e30, torch.int64: sign * (1 << 60)}
        update |= {name: x + at if at else torch.full_like(x, huge[x.dtype]) for name, x in first.items()}
    result, _ = server_update(run, updates, tmp_path)
    assert {x.dtype for x in first.values()} == {torch.float32, torch.int64}
    for name, x in first.items():
        assert bool(((x + 1 <= result.buffers[name]) & (result.buffers[name] <= x + 4)).all())


@with_each_reducer
def test_a_buffer_that_is_the_same_everywhere_keeps_its_bits(tmp_path: Path, reducer: Reducer) -> None:
    """Also where its values are not finite; with the mean, too."""
    for run in (engine(**reducer), engine()):
        updates = honest(run, spread=0.02)
        same = [(name, x) for name, x in run.first().buffers.items() if x.is_floating_point()]
        odd = {name: torch.full_like(x, (-torch.inf, torch.nan)[at % 2]) for at, (name, x) in enumerate(same)}
        made = server_update(run, [{**update, **odd} for update in updates], tmp_path)[0].buffers
        assert len(odd) > 1
        assert all(tree.same_bits(made[name], x) for name, x in odd.items())


def test_buffers_by_hand(tmp_path: Path) -> None:
    """Of 1, 5, 2, 9, 3 the median is 3, also with Krum. Without both extremes the mean is 10/3 and the largest is 5."""
    expected = [(3.0, 3), (10 / 3, 5), (3.0, 3)]
    for reducer, (mean, largest) in zip(REDUCERS, expected, strict=True):
        run = engine(**reducer)
        updates = honest(run, spread=0.02)
        for update, value in zip(updates, (1, 5, 2, 9, 3), strict=True):
            update |= {name: torch.full_like(x, value) for name, x in run.first().buffers.items()}
        for name, buffer in server_update(run, updates, tmp_path)[0].buffers.items():
            assert torch.equal(buffer, torch.full_like(buffer, mean if buffer.is_floating_point() else largest)), name


@with_each_reducer
@pytest.mark.parametrize("entries", [1, 3])
def test_the_block_size_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reducer: Reducer, entries: int
) -> None:
    """One entry at a time, three at a time, and all at once give the same bits."""
    run = engine(**reducer)
    updates = honest(run, spread=1.0)
    whole, _ = server_update(run, updates, tmp_path, steps=(1, 2, 3, 4, 5))
    monkeypatch.setattr(reduction, "BLOCK_ENTRIES", entries)
    same(server_update(run, updates, tmp_path, steps=(1, 2, 3, 4, 5))[0], whole)


def test_one_block_of_each_update_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of a centre has five rows and, with blocks of four entries, at most four columns."""
    shapes: list[torch.Size] = []

    def recorded(values: torch.Tensor, cut: int) -> torch.Tensor:
        shapes.append(values.shape)
        return trimmed_mean(values, cut)

    monkeypatch.setattr(reduction, "trimmed_mean", recorded)
    monkeypatch.setattr(reduction, "BLOCK_ENTRIES", 4)
    run = engine(model="plain", reducer="median")
    server_update(run, honest(run, spread=1.0), tmp_path)
    assert {rows for rows, _ in shapes} == {5}
    assert max(columns for _, columns in shapes) == 4


def test_a_centre_of_files_by_hand(tmp_path: Path) -> None:
    """Medians of 1, 3, 2 and of -1 * 1, -2 * 3, -1 * 2 are 2 and -2. A scalar and an empty tensor keep their shape."""
    layout = Layout.of({"s": torch.zeros(()), "e": torch.zeros(0, 2)}, trainable=("s", "e"))
    paths = [tmp_path / str(value) for value in (1, 3, 2)]
    for path in paths:
        path.write_bytes(pack({"s": torch.tensor(float(path.name)), "e": torch.zeros(0, 2)}, layout))
    one, other = centre_updates(paths, layout, [(1.0, 1.0, 1.0), (-1.0, -2.0, -1.0)], MEDIAN_OF_3)
    assert (one["s"].item(), one["s"].shape, one["e"].shape) == (2.0, torch.Size([]), torch.Size([0, 2]))
    assert other["s"].item() == -2.0
    paths[1].write_bytes(b"")
    with pytest.raises(LayoutError, match="expected a buffer of 4 bytes, got 0"):
        centre_updates(paths, layout, [(1.0, 1.0, 1.0)], MEDIAN_OF_3)


def test_clip_factors_are_part_of_the_distances(tmp_path: Path) -> None:
    """2 with a clip factor of 1/2 equals 1: of 2 (clipped), 1, 1, 9, 9 Krum keeps two of the first three."""
    run = engine("fedavg", model="plain", reducer="krum", krum_keep=2)
    x = run.first().state.x
    cohort = [fl.UpdateInfo(name, 1, 1) for name in NAMES]
    cohort[0] = replace(cohort[0], clip_factor=0.5)
    paths = [tmp_path / name for name in ("u0", "u1", "u2", "u3", "u4")]
    for path, value in zip(paths, (2.0, 1.0, 1.0, 9.0, 9.0), strict=True):
        path.write_bytes(pack({name: torch.full_like(each, value) for name, each in x.items()}, run.layout))
    assert run.server_update(run.first(), cohort, paths)[1].left_out == ("a", "b", "c")


@pytest.mark.parametrize("reducer", ["median", "trimmed_mean", "krum"])
@pytest.mark.parametrize(
    ("algorithm", "parameters", "why"),
    [
        ("scaffold", {}, "the states of its clients must add up"),
        ("feddyn", {}, "the states of its clients must add up"),
        ("fedrobust", {}, "the states of its clients must add up"),
        ("fednova", {}, "its step is as long as the step counts that clients report"),
        ("fedcm", {"normaliser": "fednova"}, "its step is as long as the step counts that clients report"),
    ],
)
def test_algorithms_that_need_a_mean_are_refused(
    algorithm: str, parameters: Mapping[str, object] | None, why: str, reducer: str
) -> None:
    """The engine is not created, and the error has the reason."""
    with pytest.raises(InvalidInput, match=f'round.reducer: expected "mean" with {algorithm}: {why}.*got {reducer}'):
        engine(algorithm, parameters=parameters, reducer=reducer)


@pytest.mark.parametrize("algorithm", ["mime", "mimelite", "mfl"])
def test_krum_requires_algorithms_that_send_only_deltas(algorithm: str) -> None:
    """Krum would keep a poisoned gradient with a normal delta. Median and trimmed mean reduce both payloads."""
    with pytest.raises(InvalidInput, match="updates are selected by their deltas"):
        engine(algorithm, reducer="krum")
    assert engine(algorithm, reducer="median").algorithm.name == algorithm


async def test_a_run_with_an_unsuitable_reducer_is_not_created(tmp_path: Path) -> None:
    """It is refused before anything is written."""
    robust_round = {"clients_per_round": 3, "quorum": 3, "reducer": "median"}
    async with World(tmp_path) as world:
        with pytest.raises(InvalidInput, match='round.reducer: expected "mean" with scaffold'):
            await world.create(algorithm={"name": "scaffold"}, population=3, round=robust_round)
        assert (list(world.coordinator.runs()), world.store.runs()) == ([], [])
