"""The noisy mean of a private round: its exact sum, its sensitivity, its noise, and what keys the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

import algorithms as fl
from fl_common.privacy.accountant import Mechanism as Account
from fl_common.privacy.accountant import epsilon_of
from fl_common.privacy.secret_stream import SecretStream
from fl_server.aggregation.privacy import (
    Mechanism,
    PrivateSum,
    discrete_gaussian,
    key_of_round,
    multiples,
)
from fl_server.aggregation.updates import AcceptedUpdates, UpdateShape
from protos.codec import pack
from protos.layout import Layout
from tests.marks import slow_except

SECRET = bytes(range(32))
UpdatesOf = Callable[..., AcceptedUpdates]
LIKE = {"w": torch.zeros(7, 5), "b": torch.zeros(5), "empty": torch.zeros(0)}


LAYOUT = Layout.of(LIKE, trainable=[*LIKE])


@pytest.fixture
def updates_of(tmp_path: Path) -> UpdatesOf:
    """Updates in files, in the order given, with clip factors."""

    def write(deltas: list[fl.Tensors], factors: Sequence[float] = ()) -> AcceptedUpdates:
        sources, cohort = [tmp_path / f"{number}" for number in range(len(deltas))], list[fl.UpdateInfo]()
        for number, (delta, path) in enumerate(zip(deltas, sources, strict=True)):
            path.write_bytes(pack(delta, LAYOUT))
            cohort.append(fl.UpdateInfo(f"c{number}", 3, 2, factors[number] if factors else 1.0))
        return AcceptedUpdates(cohort, sources, UpdateShape.of(("delta",), LAYOUT, LAYOUT))

    return write


def random_deltas(count: int, norm: float) -> list[fl.Tensors]:
    """Deltas of this norm."""
    numbers, made = torch.Generator().manual_seed(3), list[fl.Tensors]()
    for _ in range(count):
        delta = {name: torch.randn(tensor.shape, generator=numbers) for name, tensor in LIKE.items()}
        length = math.sqrt(sum(float(tensor.square().sum()) for tensor in delta.values()))
        made.append({name: norm * tensor / length for name, tensor in delta.items()})
    return made


def private(clip: float = 1.0, z: float = 1e-9, expected: float = 4.0, key: bytes = SECRET) -> PrivateSum:
    """A sum of the tensors above."""
    return PrivateSum(Mechanism(clip, z, expected), 40, key)


def distance(a: fl.Tensors, b: fl.Tensors) -> float:
    """The L2 norm of a difference."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def test_the_denominator_is_fixed(updates_of: UpdatesOf) -> None:
    """Two of four expected clients came: their mean is half of what a mean over those that came would be."""
    deltas = random_deltas(2, 0.5)
    mean = private().mean(updates_of(deltas))
    expected = {name: (deltas[0][name] + deltas[1][name]) / 4.0 for name in LIKE}
    assert distance(mean, expected) < 1e-6
    assert {name: tensor.shape for name, tensor in mean.items()} == {name: it.shape for name, it in LIKE.items()}


def test_without_updates_there_is_noise_alone(updates_of: UpdatesOf) -> None:
    """As much noise as with updates: its 40 values have the norm z C sqrt(40) / (q N), within four deviations."""
    deltas = random_deltas(3, 0.5)
    empty, some = private(z=1.0).mean(updates_of([])), private(z=1.0).mean(updates_of(deltas))
    zeros = {name: torch.zeros_like(it) for name, it in LIKE.items()}
    for mean, plain in ((empty, zeros), (some, private().mean(updates_of(deltas)))):
        assert distance(mean, plain) == pytest.approx(math.sqrt(40) / 4.0, rel=4 / math.sqrt(80))


def test_the_order_of_the_updates_changes_no_bit(updates_of: UpdatesOf) -> None:
    """Whole numbers are added."""
    deltas = random_deltas(4, 0.9)
    first, *others = [private(z=0.5).mean(updates_of([*order])) for order in permutations(deltas)]
    assert all(torch.equal(first[name], other[name]) for other in others for name in LIKE)


@pytest.mark.parametrize("norm", [1.0, 1.0 + 1e-7])
def test_one_client_changes_the_sum_by_no_more_than_the_sensitivity(norm: float, updates_of: UpdatesOf) -> None:
    """Brute force over the clients: each left out in turn, with updates of the largest norm, in steps of the grid."""
    deltas, sums = random_deltas(6, norm), private(expected=1.0)
    whole = sums.mean(updates_of(deltas))
    for left_out in range(6):
        without = sums.mean(updates_of(deltas[:left_out] + deltas[left_out + 1 :]))
        assert distance(whole, without) <= sums.sensitivity + 1e-6
    assert sums.sensitivity == pytest.approx(1.0, rel=1e-5)
    assert sums.sensitivity > 1.0


def test_longer_updates_are_scaled_by_their_clip_factors(updates_of: UpdatesOf) -> None:
    """An update of norm 5 counts as one of norm 1."""
    [long], [short] = random_deltas(1, 5.0), random_deltas(1, 1.0)
    assert distance(private().mean(updates_of([long], [0.2])), private().mean(updates_of([short]))) < 1e-6


@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.5, 40.0])
def test_the_noise_is_the_discrete_gaussian(deviation: float) -> None:
    """The frequency of each number agrees with its probability, by five standard errors."""
    count = 200_000
    found = discrete_gaussian(SecretStream(SECRET), deviation, count)
    reach = range(-int(8 * deviation) - 2, int(8 * deviation) + 3)
    weights = {k: math.exp(-k * k / (2 * deviation * deviation)) for k in reach}
    total = sum(weights.values())
    for k in list(reach)[:: max(1, len(reach) // 20)]:
        p = weights[k] / total
        assert abs(float((found == k).sum()) - count * p) <= 5 * math.sqrt(count * p * (1 - p)) + 5
    assert torch.equal(found, found.round())


def test_the_deviation_of_the_noise_is_that_of_the_mechanism(updates_of: UpdatesOf) -> None:
    """z C / (q N), at the fine grid of a round: mean and variance of 40 values in 500 rounds."""
    values = []
    for round_ in range(500):
        noise = private(2.0, 1.5, 8.0, key_of_round(SECRET, round_, 0, [])).mean(updates_of([]))
        values += [value for tensor in noise.values() for value in tensor.flatten().tolist()]
    wanted = 1.5 * 2.0 / 8.0
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    assert abs(mean) < 5 * wanted / math.sqrt(len(values))
    assert deviation == pytest.approx(wanted, rel=5 / math.sqrt(2 * len(values)))


def test_no_two_sums_share_noise(updates_of: UpdatesOf) -> None:
    """Another round, attempt, list or run has other numbers in every tensor; the same has the same bits."""
    keys = [
        key_of_round(secret, round_, attempt, clients)
        for secret in (SECRET, bytes(32))
        for round_ in (0, 1)
        for attempt in (0, 1)
        for clients in (["a", "b"], ["ab"], ["a"], [])
    ]
    found = [private(z=1.0, key=key).mean(updates_of([]))["w"] for key in keys]
    assert len({tuple(tensor.flatten().tolist()) for tensor in found}) == len(keys)
    assert torch.equal(found[0], private(z=1.0, key=keys[0]).mean(updates_of([]))["w"])
    long = discrete_gaussian(SecretStream(SECRET), 1e9, 5000)
    assert len(set(long.tolist())) > 4990
    with pytest.raises(ValueError, match="expected a secret of 32 bytes, got 3"):
        key_of_round(b"abc", 0, 0, [])


def test_another_sum_of_the_same_clients_has_other_noise(updates_of: UpdatesOf) -> None:
    """As after a backup of the ledger from before a round: what changed in one tensor changes the noise of all."""
    [delta] = random_deltas(1, 0.5)
    other = {**delta, "b": delta["b"] + 0.01}

    def noise(of: fl.Tensors) -> list[float]:
        mean = private(z=1.0, expected=1.0).mean(updates_of([of]))
        return (mean["w"] - of["w"]).flatten().tolist()

    first, second = noise(delta), noise(other)
    assert first == noise(delta)
    assert all(abs(a - b) > 1e-4 for a, b in zip(first, second, strict=True))


def test_the_sums_of_a_method_are_multiples_of_one_release() -> None:
    """FedCM needs the mean delta and the mean gradient: both follow from the mean."""
    algorithm, mean = fl.build("fedcm"), {"w": torch.ones(2)}
    wanted = algorithm.exchanges[0].sums([fl.UpdateInfo("c", 1, 5)], fl.RoundInfo(0, 0.1))
    sums = multiples(wanted, mean)
    assert sums["Dbar"]["w"].tolist() == [1.0, 1.0]
    assert sums["G"]["w"].tolist() == pytest.approx([-2.0, -2.0])


def test_a_centre_is_added_once(updates_of: UpdatesOf) -> None:
    """Clients send what they learnt alone: the public part is in the mean once, whether two came or none."""
    centre = {name: torch.full_like(tensor, 3.0) for name, tensor in LIKE.items()}
    rests = random_deltas(2, 0.8)
    mean = replace(private(), centre=centre).mean(updates_of(rests))
    expected = {name: centre[name] + (rests[0][name] + rests[1][name]) / 4.0 for name in LIKE}
    assert distance(mean, expected) < 1e-5
    assert distance(replace(private(), centre=centre).mean(updates_of([])), centre) < 1e-6


@pytest.mark.parametrize(("deviation", "trials"), slow_except([(1.0, 1000), (0.0, 1000), (1.0, 3000)], (1.0, 1000)))
def test_a_canary_is_told_from_none_as_seldom_as_promised(updates_of: UpdatesOf, deviation: float, trials: int) -> None:
    """Who knows all other updates looks for one of the largest norm, in the direction that shows it best.

    The lower bound of epsilon from the attack's errors, with 95 % confidence, is under the accountant's for the noise
    that is made, and over it when the noise is left out; 3000 trials would also show a third of the noise.
    """
    promised, delta = epsilon_of({Account(1.0, 1.0): 1}, 0.01), 0.01
    [canary] = random_deltas(1, 1.0)
    updates = {True: updates_of([canary]), False: updates_of([])}
    found = {}
    for there, some in updates.items():
        scores = []
        for trial in range(trials):
            key = key_of_round(SECRET, trial, int(there), [])
            mean = replace(private(z=deviation or 1e-9, expected=1.0, key=key)).mean(some)
            scores.append(sum(float((mean[name] * canary[name]).sum()) for name in LIKE))
        found[there] = sorted(scores)
    assert (lower_bound(found[True], found[False], delta) <= promised) == bool(deviation)


def lower_bound(there: Sequence[float], absent: Sequence[float], delta: float) -> float:
    """The largest log((TPR - delta) / FPR) over thresholds, with rates that hold at 95 % (Hoeffding, both at once)."""
    slack = math.sqrt(math.log(4 / 0.05) / (2 * len(there)))
    best = 0.0
    for threshold in (number / 20 for number in range(-20, 60)):
        hit = sum(score > threshold for score in there) / len(there) - slack
        false = sum(score > threshold for score in absent) / len(absent) + slack
        if hit > delta:
            best = max(best, math.log((hit - delta) / false))
    return best
