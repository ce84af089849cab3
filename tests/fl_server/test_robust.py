"""Reducers that are not a mean: the mean's bits where updates agree, the honest ones' where one lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import algorithms as fl
from fl_server import robust
from fl_server.engine import Engine, Snapshot
from fl_server.errors import InvalidInput
from fl_server.robust import centre_updates
from protos.codec import Layout, LayoutError, pack
from tasks import load_task
from tests.fl_server.harness import TASK, World, run_config

NAMES = ("A", "B", "a", "b", "c")
REDUCERS = [
    pytest.param({"reducer": "median"}, id="median"),
    pytest.param({"reducer": "trimmed_mean", "trim": 0.2}, id="trimmed"),
    pytest.param({"reducer": "krum", "krum_byzantine": 1, "krum_keep": 2}, id="krum"),
]


def engine(algorithm="fedcm", model="batchnorm", parameters=None, **reducer):
    """The engine of a run with five clients a round."""
    config = run_config(
        task={"name": TASK, "options": {"model": model}},
        algorithm={"name": algorithm, "parameters": parameters or {}},
        round={"clients_per_round": 5, "quorum": 5, **reducer},
    )
    return Engine(config, load_task(config.task.name, config.task.options))


def honest(engine, spread):
    """Five updates around 0.1 in every entry, with buffers of their own."""
    chance, first = torch.Generator().manual_seed(3), engine.first()
    made = []
    for _ in NAMES:
        delta = {
            name: 0.1 + spread * (torch.rand(x.shape, generator=chance) - 0.5) for name, x in first.state.x.items()
        }
        made.append({**delta, **{name: x + 1 for name, x in first.buffers.items()}})
    return made


def stepped(engine, updates, folder, steps=(2, 2, 2, 2, 2), start=None):
    """The snapshot after a round with these deltas, and the step's norms."""
    cohort = [fl.UpdateInfo(name, 3 + 4 * at, k) for at, (name, k) in enumerate(zip(NAMES, steps, strict=True))]
    paths = [folder / f"u{name}" for name in NAMES]
    payloads = engine.algorithm.exchanges[-1].payloads
    for path, update in zip(paths, updates, strict=True):
        trained = {name: update[name] for name in engine.first().state.x}
        rest = b"".join(bytes(pack(trained, Layout.of(trained, trained.keys()))) for _ in payloads[1:])
        path.write_bytes(bytes(pack(update, engine.layout)) + rest)
    return engine.step(start or engine.first(), cohort, paths)


def same(first: Snapshot, second: Snapshot, ulps=0):
    """Equal bits in model and buffers, and in the momentum but for so many units in the last place."""
    for one, other in ((first.state.x, second.state.x), (first.buffers, second.buffers)):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert list(first.state.memory) == list(second.state.memory)
    rtol = ulps * torch.finfo(torch.float32).eps
    for symbol, tensors in first.state.memory.items():
        torch.testing.assert_close(dict(tensors), dict(second.state.memory[symbol]), rtol=rtol, atol=0.0)


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize(
    ("algorithm", "parameters", "ulps"),
    [
        ("fedavg", {}, 0),
        ("fedcm", {}, 0),
        ("fedcm", {"weights": "examples"}, 1),
        ("fedavgm", {"weights": "examples"}, 0),
        ("qg", {}, 1),
        ("fedadam", {}, 0),
    ],
)
def test_equal_updates_give_the_bits_of_the_mean(tmp_path, algorithm, parameters, ulps, reducer):
    """Two rounds: whatever the weights, a centre of equal values is their mean.

    A momentum in units of a gradient is 5 delta, which may lie half-way between two float32, and the weights need not
    sum to one in their last bit: there the mean itself may be rounded either way.
    """
    results = []
    for each in ({}, reducer):
        run = engine(algorithm, parameters=parameters, **each)
        update = honest(run, spread=1.0)[0]
        snapshot, _ = stepped(run, [update] * 5, tmp_path)
        results.append(stepped(run, [update] * 5, tmp_path, start=snapshot)[0])
    same(*results, ulps=ulps)


@pytest.mark.parametrize("reducer", REDUCERS[:2])
def test_what_comes_beside_the_delta_is_centred_too(tmp_path, reducer):
    """MimeLite's momentum is made of gradients: equal ones give the mean's bits, and one bad one does not count."""
    plain, run = engine("mimelite"), engine("mimelite", **reducer)
    update = honest(run, spread=1.0)[0]
    bad = {name: -1000 * value for name, value in update.items()}
    expected, _ = stepped(plain, [update] * 5, tmp_path)
    same(stepped(run, [update] * 5, tmp_path)[0], expected)
    came, _ = stepped(run, [bad, *[update] * 4], tmp_path)
    torch.testing.assert_close(dict(came.state.memory["m"]), dict(expected.state.memory["m"]))


def bounds(updates, name):
    """The smallest and largest of each entry, with room for float32's rounding of x + movement."""
    values = torch.stack([update[name] for update in updates])
    return values.amin(0) - 1e-6, values.amax(0) + 1e-6


def poisoned(updates, at):
    """One update a thousand times as long, and backwards."""
    return [
        {name: -1000 * value if value.is_floating_point() else value for name, value in update.items()}
        if index == at
        else update
        for index, update in enumerate(updates)
    ]


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_one_poisoned_update_is_not_followed(tmp_path, reducer, at):
    """Every entry of movement and momentum stays between those of the honest four; the mean goes backwards."""
    run = engine(model="plain", **reducer)
    updates = honest(run, spread=0.02)
    came, _ = stepped(run, poisoned(updates, at), tmp_path)
    good = [update for index, update in enumerate(updates) if index != at]
    for name, x in run.first().state.x.items():
        low, high = bounds(good, name)
        movement = came.state.x[name] - x
        assert bool(((low <= movement) & (movement <= high)).all())
        # Delta = - delta / (eta_l K) with eta_l = 0.1 and K = 2.
        estimate = -0.2 * came.state.memory["Delta"][name]
        assert bool(((low <= estimate) & (estimate <= high)).all())


def test_the_mean_follows_a_poisoned_update(tmp_path):
    """Four of about 0.1 and one of about -100: the mean of each entry is near -20."""
    run = engine(model="plain")
    came, _ = stepped(run, poisoned(honest(run, spread=0.02), 0), tmp_path)
    for name, x in run.first().state.x.items():
        assert bool((came.state.x[name] - x < -15).all())


def test_who_was_left_out_is_told(tmp_path):
    """Krum keeps two of five: the poisoned one is among the three; the other reducers leave nobody out whole."""
    run = engine(model="plain", reducer="krum", krum_keep=2)
    _, norms = stepped(run, poisoned(honest(run, spread=0.02), 2), tmp_path)
    assert (len(norms.left_out), "a" in norms.left_out) == (3, True)
    assert stepped(engine(model="plain", reducer="median"), honest(run, 0.02), tmp_path)[1].left_out == ()


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_buffer_of_one_client_is_not_followed(tmp_path, reducer, sign):
    """Of a harmless delta too, in floating buffers and counters; four honest clients have x + 1 to x + 4."""
    run = engine(**reducer)
    updates, first = honest(run, spread=0.02), run.first().buffers
    for at, update in enumerate(updates):
        huge = {torch.float32: sign * 1e30, torch.int64: sign * (1 << 60)}
        update |= {name: x + at if at else torch.full_like(x, huge[x.dtype]) for name, x in first.items()}
    came, _ = stepped(run, updates, tmp_path)
    assert {x.dtype for x in first.values()} == {torch.float32, torch.int64}
    for name, x in first.items():
        assert bool(((x + 1 <= came.buffers[name]) & (came.buffers[name] <= x + 4)).all())


def test_buffers_by_hand(tmp_path):
    """Of 1, 5, 2, 9, 3 the median is 3, with Krum too; without both ends the mean is 10/3 and the largest 5."""
    expected = [(3.0, 3), (10 / 3, 5), (3.0, 3)]
    for (reducer, *_), (mean, largest) in zip((each.values for each in REDUCERS), expected, strict=True):
        run = engine(**reducer)
        updates = honest(run, spread=0.02)
        for update, value in zip(updates, (1, 5, 2, 9, 3), strict=True):
            update |= {name: torch.full_like(x, value) for name, x in run.first().buffers.items()}
        for name, buffer in stepped(run, updates, tmp_path)[0].buffers.items():
            assert torch.equal(buffer, torch.full_like(buffer, mean if buffer.is_floating_point() else largest)), name


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("entries", [1, 3])
def test_blocks_change_nothing(tmp_path, monkeypatch, reducer, entries):
    """One entry at a time, three at a time, and all at once give the same bits."""
    run = engine(**reducer)
    updates = honest(run, spread=1.0)
    whole, _ = stepped(run, updates, tmp_path, steps=(1, 2, 3, 4, 5))
    monkeypatch.setattr(robust, "BLOCK_ENTRIES", entries)
    same(stepped(run, updates, tmp_path, steps=(1, 2, 3, 4, 5))[0], whole)


def test_no_more_than_a_block_of_each_update_is_read_at_once(tmp_path, monkeypatch):
    """What a centre is made of has five rows and, with blocks of four, at most four columns."""
    shapes, centre = [], robust.trimmed_mean
    monkeypatch.setattr(robust, "trimmed_mean", lambda values, cut: shapes.append(values.shape) or centre(values, cut))
    monkeypatch.setattr(robust, "BLOCK_ENTRIES", 4)
    run = engine(model="plain", reducer="median")
    stepped(run, honest(run, spread=1.0), tmp_path)
    assert {rows for rows, _ in shapes} == {5}
    assert max(columns for _, columns in shapes) == 4


def test_a_centre_of_files_by_hand(tmp_path):
    """Medians of 1, 3, 2 and of -1 * 1, -2 * 3, -1 * 2: 2 and -2; a scalar and an empty tensor keep their shape."""
    layout = Layout.of({"s": torch.zeros(()), "e": torch.zeros(0, 2)}, trainable=("s", "e"))
    paths = [tmp_path / str(value) for value in (1, 3, 2)]
    for path in paths:
        path.write_bytes(pack({"s": torch.tensor(float(path.name)), "e": torch.zeros(0, 2)}, layout))
    one, other = centre_updates(paths, layout, [(1.0, 1.0, 1.0), (-1.0, -2.0, -1.0)], cut=1)
    assert (one["s"].item(), one["s"].shape, one["e"].shape) == (2.0, torch.Size([]), torch.Size([0, 2]))
    assert other["s"].item() == -2.0
    paths[1].write_bytes(b"")
    with pytest.raises(LayoutError, match="expected a buffer of 4 bytes, got 0"):
        centre_updates(paths, layout, [(1.0, 1.0, 1.0)], cut=1)


def test_clip_factors_are_part_of_the_distances(tmp_path):
    """Twice as long and clipped by half is equal: of 2 (clipped), 1, 1, 9, 9 the first three agree, and are kept."""
    run = engine("fedavg", model="plain", reducer="krum", krum_keep=2)
    x = run.first().state.x
    cohort = [fl.UpdateInfo(name, 1, 1) for name in NAMES]
    cohort[0] = replace(cohort[0], clip_factor=0.5)
    paths = [tmp_path / name for name in ("u0", "u1", "u2", "u3", "u4")]
    for path, value in zip(paths, (2.0, 1.0, 1.0, 9.0, 9.0), strict=True):
        path.write_bytes(pack({name: torch.full_like(each, value) for name, each in x.items()}, run.layout))
    assert run.step(run.first(), cohort, paths)[1].left_out == ("a", "b", "c")


@pytest.mark.parametrize("reducer", ["median", "trimmed_mean", "krum"])
@pytest.mark.parametrize(
    ("algorithm", "parameters", "why"),
    [
        ("scaffold", {}, "what its clients keep must add up"),
        ("feddyn", {}, "what its clients keep must add up"),
        ("fedrobust", {}, "what its clients keep must add up"),
        ("fednova", {}, "its step is as long as the steps that clients say they made"),
        ("fedcm", {"normaliser": "fednova"}, "its step is as long as the steps that clients say they made"),
    ],
)
def test_methods_that_need_a_mean_are_refused(algorithm, parameters, why, reducer):
    """At creation, with the reason."""
    with pytest.raises(InvalidInput, match=f'round.reducer: expected "mean" with {algorithm}: {why}.*got {reducer}'):
        engine(algorithm, parameters=parameters, reducer=reducer)


@pytest.mark.parametrize("algorithm", ["mime", "mimelite", "mfl"])
def test_krum_takes_methods_that_send_deltas_alone(algorithm):
    """A poisoned gradient beside a harmless delta would be kept; median and trimmed mean look at both."""
    with pytest.raises(InvalidInput, match="updates are chosen by their deltas, and its clients send more"):
        engine(algorithm, reducer="krum")
    assert engine(algorithm, reducer="median").algorithm.name == algorithm


async def test_a_run_that_its_reducer_would_break_is_not_made(tmp_path):
    """The refusal comes before anything is written."""
    robust_round = {"clients_per_round": 3, "quorum": 3, "reducer": "median"}
    async with World(tmp_path) as world:
        with pytest.raises(InvalidInput, match='round.reducer: expected "mean" with scaffold'):
            await world.create(algorithm={"name": "scaffold"}, population=3, round=robust_round)
        assert (list(world.coordinator.runs()), world.store.runs()) == ([], [])
