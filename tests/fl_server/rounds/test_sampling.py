"""Cohorts and seeds: uniform, independent of order and process, and empty only without clients."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from fl_server.rounds.sampling import (
    Draw,
    by_id,
    draw_bernoulli,
    draw_evaluators,
    draw_fixed,
    drawn_steps,
    initial_model_seed,
    ticket,
    training_seed,
)

POOL = tuple(f"client-{number}" for number in range(10))


def chi_square(counts: list[int], expected: float) -> float:
    """Sum of (observed - expected)^2 / expected."""
    return sum((count - expected) ** 2 / expected for count in counts)


def test_fixed_cohorts_are_uniform_over_all_subsets() -> None:
    """6,000 draws of 2 of 4 clients: each of the 6 pairs comes about 1,000 times.

    Chi-square with 5 degrees of freedom exceeds 30 with probability 1.5e-5; the draws are fixed.
    """
    pairs = Counter(draw_fixed("abcd", 2, Draw(seed=1, round=t, attempt=0)) for t in range(6000))
    assert chi_square([pairs[pair] for pair in combinations("abcd", 2)], 1000) < 30


@pytest.mark.parametrize("part", ["seed", "round", "attempt"])
def test_each_part_of_a_draw_varies_the_cohort(part: str) -> None:
    """Over 5,000 seeds, rounds or attempts each of 10 clients is drawn 500 times: chi-square of 9 degrees below 40."""
    start = {"seed": 3, "round": 3, "attempt": 3}
    counts = Counter(draw_fixed(POOL, 1, Draw(**{**start, part: value}))[0] for value in range(5000))
    assert chi_square([counts[client] for client in POOL], 500) < 40


def test_bernoulli_takes_each_client_with_its_rate_and_independently() -> None:
    """3,000 draws at rate 0.4 of 3 clients: the sizes follow the binomial, given that the cohort is not empty.

    P(k) = C(3, k) 0.4^k 0.6^(3 - k) / (1 - 0.6^3): 0.551, 0.367, 0.082; chi-square with 2 degrees stays below 25.
    """
    sizes = Counter(len(draw_bernoulli("abc", 0.4, Draw(seed=2, round=t, attempt=0))) for t in range(3000))
    expected = {1: 0.432 / 0.784, 2: 0.288 / 0.784, 3: 0.064 / 0.784}
    assert set(sizes) == set(expected)
    assert sum((sizes[k] - 3000 * p) ** 2 / (3000 * p) for k, p in expected.items()) < 25


@pytest.mark.parametrize("kind", ["fixed", "bernoulli"])
def test_the_order_of_the_pool_does_not_matter(kind: str) -> None:
    """A shuffled pool gives the same cohort, in the order of id bytes."""
    shuffled = POOL[5:] + POOL[4::-1]
    for draw in (Draw(1, t, 0) for t in range(20)):
        one, other = (
            draw_fixed(pool, 4, draw) if kind == "fixed" else draw_bernoulli(pool, 0.4, draw)
            for pool in (POOL, shuffled)
        )
        assert one == other == by_id(one)


def test_another_process_draws_the_same() -> None:
    """Cohorts and seeds are functions of their arguments, not of the process and its hash seed."""
    code = """from fl_server.rounds.sampling import *
draw = Draw(7, 3, 1)
print(draw_fixed("abcdefgh", 3, draw), draw_bernoulli("abcdefgh", 0.3, draw), training_seed(7, 3, "a"))"""
    root = Path(__file__).parents[3]
    there = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    draw = Draw(7, 3, 1)
    here = (draw_fixed("abcdefgh", 3, draw), draw_bernoulli("abcdefgh", 0.3, draw), training_seed(7, 3, "a"))
    assert there.split() == " ".join(map(str, here)).split()


def test_tickets_do_not_change_between_versions() -> None:
    r"""A ticket is the big-endian BLAKE2b-64 of its parts: another version that drew otherwise would break restarts.

    Made by `printf 'fixed\x1f7\x1f0\x1f0\x1fa' | b2sum -l 64`.
    """
    assert ticket("fixed", 7, 0, 0, "a") == 0xC90CB9BEAA3770BC


def test_a_client_that_leaves_does_not_move_the_others() -> None:
    """Without a client that was not drawn the cohort is the same."""
    cohort = draw_fixed(POOL, 3, Draw(1, 2, 0))
    smaller = [client for client in POOL if client in cohort or client < "client-5"]
    assert draw_fixed(smaller, 3, Draw(1, 2, 0)) == cohort


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 1), (10, 10), (99, 10)])
def test_a_fixed_cohort_has_its_size_or_the_whole_pool(size: int, expected: int) -> None:
    """A cohort of one is one client; a smaller pool is drawn as a whole."""
    assert len(set(draw_fixed(POOL, size, Draw(1, 0, 0)))) == expected


def test_an_empty_pool_gives_an_empty_cohort() -> None:
    """Without clients the draw returns, without endless redraws."""
    assert draw_fixed((), 3, Draw(1, 0, 0)) == draw_bernoulli((), 0.5, Draw(1, 0, 0)) == ()


def test_an_empty_bernoulli_cohort_is_drawn_again() -> None:
    """At rate 0.05 a single client is missed 19 times of 20, and yet is always the cohort: |S| = 1."""
    assert {draw_bernoulli(("a",), 0.05, Draw(1, t, 0)) for t in range(50)} == {("a",)}


def test_a_tiny_rate_draws_one_client_at_once() -> None:
    """At rate 1e-12 redraws would not end; one client is drawn, uniformly: chi-square of 3 degrees below 25."""
    cohorts = Counter(draw_bernoulli("abcd", 1e-12, Draw(1, t, 0)) for t in range(400))
    assert chi_square([cohorts[(client,)] for client in "abcd"], 100) < 25


def test_rate_one_draws_all_clients() -> None:
    """With probability 1 no client is left out."""
    assert draw_bernoulli(POOL, 1.0, Draw(1, 0, 0)) == POOL


@pytest.mark.parametrize("rate", [0.0, -0.5])
def test_a_rate_of_zero_is_refused(rate: float) -> None:
    """A rate that can draw no client is an error, not an endless loop."""
    with pytest.raises(ValueError, match="rate over 0"):
        draw_bernoulli(POOL, rate, Draw(1, 0, 0))


def test_evaluators_are_drawn_independently() -> None:
    """Size 0 draws all; otherwise each of ten clients is in 3/10 of 400 draws, independent of the cohorts."""
    assert draw_evaluators(POOL, 0, 1, 0) == POOL
    draws = [draw_evaluators(reversed(POOL), 3, 1, t) for t in range(400)]
    assert draws == [draw_evaluators(POOL, 3, 1, t) for t in range(400)]
    assert chi_square([sum(client in draw for draw in draws) for client in POOL], 120) < 25
    assert sum(draw == draw_fixed(POOL, 3, Draw(1, t, 0)) for t, draw in enumerate(draws)) < 20


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_drawn_steps_are_geometric(p: float) -> None:
    """Of 4,000 rounds the share with k steps is (1 - p)^(k - 1) p, and the mean number of steps is 1 / p."""
    drawn = [drawn_steps(p, 7, round_, 10**6) for round_ in range(4000)]
    expected = [4000 * (1 - p) ** (k - 1) * p for k in range(1, 5)]
    found = [drawn.count(k) for k in range(1, 5)]
    assert sum((a - b) ** 2 / b for a, b in zip(found, expected, strict=True)) < 18.5  # 0.1 % exceed it by chance
    assert sum(drawn) / 4000 == pytest.approx(1 / p, rel=0.05)


def test_drawn_steps_depend_on_seed_and_round_alone_and_have_a_limit() -> None:
    """The same numbers in every version, 1 for p = 1, and no more than the limit."""
    assert [drawn_steps(0.1, 3, round_, 100) for round_ in range(6)] == [17, 5, 3, 6, 17, 8]
    assert [drawn_steps(0.1, 4, round_, 100) for round_ in range(6)] != [17, 5, 3, 6, 17, 8]
    assert {drawn_steps(1.0, 3, round_, 100) for round_ in range(6)} == {1}
    assert {drawn_steps(1e-12, 3, round_, 100) for round_ in range(6)} == {100}


def test_training_seeds_differ_by_run_seed_round_and_client() -> None:
    """No two of 2 x 20 x 10 seeds are the same, and each fits 64 bits. An attempt is not among the arguments."""
    seeds = {training_seed(seed, t, client) for seed in (1, 2) for t in range(20) for client in POOL}
    assert len(seeds) == 400
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_model_seeds_fit_a_signed_integer() -> None:
    """Half the range of a ticket: torch's generators and every store's integer column take them."""
    assert all(0 <= initial_model_seed(seed) < 1 << 63 for seed in range(100))
