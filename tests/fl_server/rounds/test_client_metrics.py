"""Statistics of the clients' evaluations, with values computed by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from fl_server.rounds.metrics import Directions, has_evaluation, spread, summary


def test_four_clients() -> None:
    """Accuracies 0.2, 0.4, 0.6, 0.8 over 10, 20, 30, 40 examples.

    Mean 2.0 / 4 = 0.5. Squares of the deviations 0.09 + 0.01 + 0.01 + 0.09 = 0.2; / 4 = 0.05, root 0.2236068. Worst
    decile: ceil(0.4) = 1 client, 0.2; best: 0.8. Over examples (2 + 8 + 18 + 32) / 100 = 0.6.
    """
    found = summary(
        [(10, {"accuracy": 0.2}), (20, {"accuracy": 0.4}), (30, {"accuracy": 0.6}), (40, {"accuracy": 0.8})],
        Directions(),
    )
    assert found == pytest.approx(
        {
            "clients_evaluated": 4,
            "clients_accuracy_mean": 0.5,
            "clients_accuracy_std": math.sqrt(0.05),
            "clients_accuracy_worst_decile": 0.2,
            "clients_accuracy_best_decile": 0.8,
            "clients_accuracy": 0.6,
        }
    )


def test_a_decile_of_eleven_clients_is_two() -> None:
    """Values 0 to 10: ceil(1.1) = 2. Worst of an accuracy are (0 + 1) / 2, best (9 + 10) / 2; of a loss the reverse."""
    found = summary([(1, {"accuracy": float(n), "loss": float(n)}) for n in range(11)], Directions())
    assert (found["clients_accuracy_worst_decile"], found["clients_loss_worst_decile"]) == (0.5, 9.5)
    assert (found["clients_accuracy_best_decile"], found["clients_loss_best_decile"]) == (9.5, 0.5)


def test_the_worst_decile_goes_by_the_direction_that_is_declared() -> None:
    """The name says nothing: a "gloss" may be better when higher. Without a direction there is no worst decile."""
    values = [(1, {"gloss": 0.25}), (1, {"gloss": 0.75})]
    of = {lower: summary(values, Directions({"gloss": lower})) for lower in (True, False)}
    assert [of[lower]["clients_gloss_worst_decile"] for lower in (True, False)] == [0.75, 0.25]
    unknown = summary(values, Directions())
    assert "clients_gloss_worst_decile" not in unknown
    assert spread(unknown) == {"gloss": {"mean": 0.5, "deviation": 0.25}}


def test_one_client_is_mean_and_worst() -> None:
    """The deviation is 0."""
    found = summary([(7, {"loss": 0.25})], Directions())
    assert found == {
        "clients_evaluated": 1, "clients_loss_mean": 0.25, "clients_loss_std": 0, "clients_loss_worst_decile": 0.25,
        "clients_loss_best_decile": 0.25, "clients_loss": 0.25,
    }  # fmt: skip


def test_no_client_reported() -> None:
    """The evaluation ends with a count of 0 clients."""
    assert summary([], Directions()) == {"clients_evaluated": 0}


def test_the_order_of_the_clients_changes_no_bit() -> None:
    """0.1, 0.2, 0.3 and 1e-17 sum up differently in floating point when added one by one."""
    values = [(3, {"f1": value}) for value in (0.1, 0.2, 0.3, 1e-17)]
    assert all(
        summary(order, Directions()) == summary(values, Directions()) for order in itertools.permutations(values)
    )


def test_a_metric_of_one_client_alone_is_left_out() -> None:
    """Two of three clients share a metric. A metric of only one is left out, and a missing value is not zero."""
    found = summary([(1, {"accuracy": 0.5}), (1, {"accuracy": 0.7}), (1, {"mine": 1.0})], Directions())
    assert found["clients_accuracy_mean"] == pytest.approx(0.6)
    assert not any("mine" in name for name in found)


@pytest.mark.parametrize(
    ("metrics", "server", "clients"),
    [
        ({}, False, False),
        ({"accuracy": 0.5}, True, False),
        ({"clients_evaluated": 0.0}, False, True),
        ({"accuracy": 0.5, "clients_evaluated": 2.0}, True, True),
    ],
)
def test_the_source_of_a_metric_must_have_reported(metrics: dict[str, float], server: bool, clients: bool) -> None:
    """A metric of the server needs the server's evaluation, and one of the clients needs theirs."""
    assert has_evaluation(metrics, "accuracy") is server
    assert has_evaluation(metrics, "clients_accuracy_mean") is clients


def test_the_spread_of_a_round_is_read_from_its_metrics() -> None:
    """Also if a task's metric has the name of a statistic; the server's metrics are no part of it."""
    found = summary([(10, {"x_mean": 2.0}), (10, {"x_mean": 4.0})], Directions({"x_mean": False}))
    assert spread({**found, "accuracy": 0.9, "accuracy_mean": 0.9}) == {
        "x_mean": {"mean": 3.0, "deviation": 1.0, "worst_decile": 2.0, "best_decile": 4.0}
    }
