"""Sums over updates: weights, rounding, order, buffers, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl
from algorithms import tree

COHORT = [fl.UpdateInfo("a", 1, 1), fl.UpdateInfo("b", 3, 1)]


def test_weights_by_hand() -> None:
    """1 and 3 examples: 1/2 each when uniform, 1/4 and 3/4 by examples."""
    assert fl.uniform_weights(COHORT) == (0.5, 0.5)
    assert fl.example_weights(COHORT) == (0.25, 0.75)


@pytest.mark.parametrize("weigh", [fl.uniform_weights, fl.example_weights])
def test_no_updates_have_no_weights(weigh: Callable[[Sequence[fl.UpdateInfo]], tuple[float, ...]]) -> None:
    """An empty cohort is an error with words, not a division by zero."""
    with pytest.raises(ValueError, match="expected at least one update, got none"):
        weigh([])


def test_sums_are_accumulated_in_float64() -> None:
    """1e8 + 1 - 1e8 = 1; in float32 the 1 would be lost, as 1e8 has no digit left for it."""
    blocks = [torch.tensor([value], dtype=torch.float32) for value in (1e8, 1.0, -1e8)]
    [total] = fl.weighted_sums(blocks, [(1.0, 1.0, 1.0)])
    assert (total.item(), total.dtype) == (1.0, torch.float32)


def test_each_row_is_a_sum_by_hand() -> None:
    """Blocks 1 and 2: 3 * 1 + 4 * 2 = 11, and 1 * 1 - 1 * 2 = -1."""
    sums = fl.weighted_sums(iter([torch.tensor([1.0]), torch.tensor([2.0])]), [(3.0, 4.0), (1.0, -1.0)])
    assert [total.item() for total in sums] == [11.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_in_one_tensor_have_the_bits_of_one_after_the_other(dtype: torch.dtype) -> None:
    """Also with a negative zero in all of them, and with two rows."""
    blocks = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    blocks[:, 0, 0] = -0.0
    rows = [[0.1, 0.2, 0.3, 0.05, 0.05, 0.1, 0.2], [1.0, -2.0, 0.5, 0.0, 3.0, 1e-3, 7.0]]
    for together, apart in zip(fl.weighted_sums(blocks, rows), fl.weighted_sums(iter(blocks), rows), strict=True):
        assert together.dtype == apart.dtype
        assert torch.equal(tree.bits(together), tree.bits(apart))


def test_blocks_are_not_collected() -> None:
    """However many blocks come, no more than three are alive: memory does not grow with the cohort."""

    def blocks() -> Iterator[Tensor]:
        alive = []
        for value in range(9):
            block = torch.full((3,), float(value))
            alive.append(weakref.ref(block))
            assert sum(ref() is not None for ref in alive) <= 3
            yield block

    assert fl.weighted_sums(blocks(), [(1.0,) * 9])[0].tolist() == [36.0] * 3
    assert fl.maximum(blocks()).tolist() == [8.0] * 3


def test_large_tensors_sum_as_small_ones_do() -> None:
    """Whole updates are cut inside; entries past the first block, shapes and scalars come out right."""
    updates = [{"w": torch.arange(70_002.0).reshape(2, -1) * k, "s": torch.tensor(1.0 * k)} for k in (1, 2)]
    [total] = fl.weighted_sums_of_tensors(updates, [(1.0, 0.5)])
    assert torch.equal(total["w"], updates[1]["w"])
    assert (total["s"].shape, total["s"].item()) == (torch.Size([]), 2.0)


def test_no_blocks_are_refused() -> None:
    """A maximum over nothing has no value."""
    with pytest.raises(ValueError, match="expected at least one block, got 0"):
        fl.maximum([])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([torch.zeros(2)], "expected 2 blocks, .* got 1"),
        ([torch.zeros(2)] * 3, "expected 2 blocks, .* got more"),
        ([torch.zeros(2), torch.zeros(1)], "expected blocks of one shape and dtype"),
        ([torch.zeros(2), torch.zeros(2).double()], "expected blocks of one shape and dtype"),
        ([torch.zeros(2, dtype=torch.long)] * 2, "floating dtype, got torch.int64"),
    ],
    ids=["few", "many", "shape", "dtype", "integers"],
)
def test_blocks_that_do_not_fit_are_refused(blocks: Iterable[Tensor], message: str) -> None:
    """A wrong number or layout is an error, also where torch would broadcast."""
    with pytest.raises(ValueError, match=message):
        fl.weighted_sums(blocks, [(0.5, 0.5)])


def test_updates_of_different_models_are_refused() -> None:
    """A name that one update lacks or has too much is named."""
    with pytest.raises(ValueError, match=r"\['v'\] missing"):
        fl.weighted_sums_of_tensors([{"v": torch.zeros(1)}, {"w": torch.zeros(1)}], [(0.5, 0.5)])


def test_inputs_are_not_shared_with_results() -> None:
    """One float64 update at weight 1, and one integer block: results are copies."""
    block, counter = torch.ones(2, dtype=torch.float64), torch.tensor(3)
    fl.weighted_sums([block], [(1.0,)])[0].zero_()
    fl.maximum([counter]).zero_()
    assert (block.tolist(), counter.item()) == ([1.0, 1.0], 3)


def test_a_buffer_that_is_the_same_everywhere_keeps_its_bits() -> None:
    """Also minus infinity with a weight of 0, a NaN, and a float64 that a mean would round."""
    third = torch.tensor([1 / 3], dtype=torch.float64)
    same = {"mask": torch.tensor([0.0, -torch.inf]), "nan": torch.tensor([torch.nan]), "third": third}
    averaged = fl.average_buffers([same] * 3, (0.0, 0.7, 0.3))
    assert all(tree.same_bits(averaged[name], tensor) for name, tensor in same.items())


def test_buffers_by_hand() -> None:
    """Floats: 0.25 * 2 + 0.75 * 6 = 5; counters 4 and 9: 9, not a mean; flags: any."""
    updates = [
        {"mean": torch.tensor([2.0]), "count": torch.tensor(4), "flag": torch.tensor(True)},
        {"mean": torch.tensor([6.0]), "count": torch.tensor(9), "flag": torch.tensor(False)},
    ]
    averaged = fl.average_buffers(updates, (0.25, 0.75))
    assert {name: value.item() for name, value in averaged.items()} == {"mean": 5.0, "count": 9, "flag": True}
    assert averaged["count"].dtype == torch.int64


def test_running_variance_is_never_negative() -> None:
    """In ten FedCM rounds with an overshooting server rate, batch norm variances stay positive and counters add up."""
    torch.manual_seed(0)
    fedcm = fl.build("fedcm", alpha=0.1, eta_g=1.9)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    start = fl.read_state(model)
    state, buffers = fedcm.init(start.trainable), start.buffers
    shards = {client: (scale * torch.randn(8, 3), torch.randn(8, 1)) for client, scale in (("a", 5.0), ("b", 0.01))}
    for t in range(10):
        rule, results = fedcm.local_rule(fedcm.direction(state)), []
        for shard in shards.values():
            fl.load_state(model, fl.ModelState(state.x, buffers, {}))
            results.append(fl.train_locally(model, [shard], nn.functional.mse_loss, rule, fl.LocalSettings(0.1)))
        infos = [fl.UpdateInfo(client, 8, 1) for client in shards]
        deltas = [(info, result.delta) for info, result in zip(infos, results, strict=True)]
        state = fl.apply_updates(fedcm, state, deltas, fl.RoundInfo(t, 0.1))
        buffers = fl.average_buffers([result.buffers for result in results], fedcm.weights(infos))
        assert buffers["1.running_var"].min() > 0
        assert buffers["1.num_batches_tracked"].item() == t + 1


@pytest.mark.parametrize("facts", [{"num_examples": 0, "num_steps": 1}, {"num_examples": 1, "num_steps": 0}], ids=str)
def test_update_of_no_work_is_refused(facts: dict[str, int]) -> None:
    """No examples or no steps would divide by zero later."""
    with pytest.raises(ValueError, match="expected an update of at least one example and one step"):
        fl.UpdateInfo("a", **facts)
