"""The clip that follows the lengths of updates: its direction, its noise, and what it costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import algorithms as fl
from fl_server.aggregation import privacy
from fl_server.aggregation.privacy import ClipRule, clip_rule, key_of_round
from fl_server.errors import InvalidInput
from protos.codec import pack
from tests.fl_server.aggregation.test_private_updates import PRIVACY, STEPS, private
from tests.fl_server.harness import run_config

RULE = ClipRule(first=1.0, quantile=0.5, rate=0.2, noise=1e-9, noise_multiplier=1e-12, expected=10.0)
KEY = bytes(32)


def after(rule: ClipRule, clip: float, norms: list[float], key: bytes = KEY) -> float:
    """C of the next round."""
    return rule.next(clip, rule.count(clip, norms, key))


def test_the_count_is_of_updates_that_are_not_clipped() -> None:
    """All of them are shorter: C falls by exp(-0.2 / 2). All are clipped: it rises. Half of them: it stays."""
    assert after(RULE, 2.0, [0.1] * 10) == pytest.approx(2.0 * math.exp(-0.1))
    assert after(RULE, 2.0, [2.0] * 10) == pytest.approx(2.0 * math.exp(0.1))
    assert after(RULE, 2.0, [0.1] * 5 + [2.0] * 5) == 2.0


def test_an_update_that_was_clipped_on_its_device_is_counted_as_clipped() -> None:
    """Rounding made it a little shorter than C."""
    assert RULE.count(2.0, [1.999, 2.001, 1.9], KEY) == -1.0


def test_who_did_not_come_counts_as_half() -> None:
    """The denominator is fixed: without updates C stays where the quantile is 1/2."""
    assert after(RULE, 2.0, []) == 2.0
    assert after(RULE, 2.0, [0.1] * 5) == pytest.approx(2.0 * math.exp(-0.05))


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_the_clip_becomes_the_quantile_of_the_norms(quantile: float) -> None:
    """From a hundredth of it and from a hundred times it, for norms of a log-normal distribution."""
    norms = torch.randn(500, generator=torch.Generator().manual_seed(5)).exp().tolist()
    wanted = sorted(norms)[int(500 * quantile)]
    rule = ClipRule(1.0, quantile, 0.2, 1e-9, 1e-12, 500.0)
    for start in (wanted / 100, wanted * 100):
        clip = start
        for _ in range(300):
            clip = after(rule, clip, norms)
        assert clip == pytest.approx(wanted, rel=0.1)


def test_the_clip_stays_within_its_reach_whatever_the_noise() -> None:
    """No count makes a number that overflows, or a clip of 0."""
    assert RULE.next(1.0, 1e12) == 2.0**-20
    assert RULE.next(1.0, -1e12) == 2.0**20


def test_the_noise_of_the_count_is_its_own_and_has_its_deviation() -> None:
    """sigma_b of b - 1/2 is 2 sigma_b of the votes; another round has other noise, and the same the same."""
    rule = ClipRule(1.0, 0.5, 0.2, 2.5, 1.0, 10.0)
    counts = [rule.count(1.0, [], key_of_round(KEY, round_, 0, [])) for round_ in range(1000)]
    deviation = math.sqrt(sum(count * count for count in counts) / len(counts))
    assert deviation == pytest.approx(5.0, rel=5 / math.sqrt(2 * len(counts)))
    assert all(count == round(count) for count in counts)
    assert rule.count(1.0, [], KEY) == rule.count(1.0, [], KEY)


def adaptive(**privacy: float) -> dict[str, Any]:
    """The sections of a run with an adaptive clip."""
    return {"clip_quantile": 0.5, **privacy}


@pytest.mark.parametrize("z", [0.7, 1.0, 3.0])
def test_updates_and_count_together_are_one_release_of_the_charged_noise(
    tmp_path: Path, z: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brute force over the clients: what one changes, in deviations of the noise, is at most 1 / z in the L2 norm.

    The change is measured with the same key, so that the noise cancels out; z is what the account is charged.
    """
    monkeypatch.setattr(privacy, "_digest", lambda totals: b"the same for all sums")
    run = private({"name": "fedavg", "parameters": {"weights": "uniform"}}, **adaptive(noise_multiplier=z, clip=0.5))
    rule, first = clip_rule(run.config), run.first()
    assert rule is not None
    assert rule.noise_multiplier_of_sum > z
    numbers = torch.Generator().manual_seed(3)
    cohort, paths = [], []
    for number, norm in enumerate([0.5, 0.5, 0.2]):
        delta = {name: torch.randn(x.shape, generator=numbers) for name, x in first.state.x.items()}
        length = math.sqrt(sum(float(it.square().sum()) for it in delta.values()))
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(pack({name: norm * it / length for name, it in delta.items()}, run.layout))
        cohort.append((fl.UpdateInfo("same", 7, STEPS), norm))
    quiet = ClipRule(0.5, 0.5, 0.2, 1e-9, 1e-12, rule.expected)
    votes = [quiet.count(0.5, [norm], KEY) for _, norm in cohort]
    whole = run.private_update(first, cohort, paths, 0)[0].state.x
    largest = 0.0
    for out in range(3):
        rest = [number for number in range(3) if number != out]
        # The key has the accepted clients, which are all named alike here, and as many: the one left out sends zeros.
        zeros = tmp_path / "zeros"
        zeros.write_bytes(pack({name: torch.zeros_like(x) for name, x in first.state.x.items()}, run.layout))
        kept = [paths[number] if number in rest else zeros for number in range(3)]
        without = run.private_update(first, cohort, kept, 0)[0].state.x
        moved = sum(float((whole[name].double() - without[name].double()).square().sum()) for name in whole)
        in_sum = math.sqrt(moved) * rule.expected / (rule.noise_multiplier_of_sum * first.clip)
        in_count = abs(votes[out]) / (2.0 * rule.noise)
        largest = max(largest, math.hypot(in_sum, in_count))
    assert 0.99 / z < largest <= (1.0 + 1e-4) / z


def test_the_next_clip_is_part_of_the_state() -> None:
    """It follows from the round's updates and key, and a checkpoint has it."""
    run = private({"name": "fedavg", "parameters": {"weights": "uniform"}}, **adaptive(clip_noise=2.0))
    first = run.first()
    made, stats = run.private_update(first, [], [], 0)
    assert (first.clip, stats.clip) == (100.0, 100.0)
    assert made.clip != first.clip
    checkpoint = run.snapshots.checkpoint(made, {"round": 0})
    assert run.restored(checkpoint).clip == made.clip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_rate": 0.3}, "expected clip_quantile with clip_rate and clip_noise"),
        ({"clip_quantile": 1.0}, "privacy.clip_quantile"),
        ({"clip_quantile": 0.5, "clip_noise": 0.5, "noise_multiplier": 1.0}, "privacy.clip_noise: expected over noise"),
        (
            {"clip_quantile": 0.5, "unit": "record", "max_epsilon": None},
            'expected no clip_quantile with unit = "record"',
        ),
    ],
)
def test_settings_that_no_release_could_have_are_refused(changes: dict[str, Any], words: str) -> None:
    """Each names its key."""
    with pytest.raises(InvalidInput, match=words):
        clip_rule(run_config(privacy=PRIVACY | changes, population=3, round={"sampling": "bernoulli", "rate": 1.0}))
