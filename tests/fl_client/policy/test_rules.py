"""Each rule alone: what it accepts, what it refuses, and the text of the refusal."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import algorithms
from fl_client.monitoring.metrics import DAY_AMOUNTS, POLICY_RULES
from fl_client.policy.budget import NAMES
from fl_client.policy.config import NO_POLICY, Policy
from fl_client.policy.rules import OrderedWork, Request, ShardSize, refusal, work_of
from fl_client.policy.site import ordered_work
from fl_tasks.batches import count_steps
from protos.fl.v1 import training_pb2

SOURCE = "sha256:" + "ab" * 32
WORK = OrderedWork(10, Fraction(5), 500, batch=50, used=100, local_steps=10)
TRAINING = Request("training", "digits", SOURCE, "fedcm", work=WORK, model_bytes=1000, min_clients=3)
EVALUATION = Request("evaluation", "digits", SOURCE, model_bytes=1000)


def refused(policy: dict[str, Any], request: Request = TRAINING) -> tuple[str, str] | None:
    """Rule and text of the refusal by a policy."""
    verdict = refusal(Policy.model_validate(policy), request)
    return None if verdict is None else (verdict.rule, verdict.text)


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"tasks": {"allow": ["other", "digits"]}},
    {"tasks": {"fingerprints": {"digits": ["00" * 32, SOURCE]}}},
    {"tasks": {"fingerprints": {"other": ["00" * 32]}}},
    {"algorithms": {"allow": ["fedcm"]}},
    {"work": {"max_epochs": 5, "max_steps": 10, "max_model_bytes": 1000}},
    {"work": {"min_batch_size": 50, "min_examples": 100, "min_steps": 10, "min_clients": 3}},
    {"share": {"evaluations": False, "labels": False, "device": False}},
]


@pytest.mark.parametrize("policy", ACCEPTED, ids=str)
def test_what_a_policy_allows_is_accepted(policy: dict[str, Any]) -> None:
    """Limits are reached, and not exceeded."""
    assert refused(policy) is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tasks": {"allow": ["digit"]}}, "tasks", "'digits' is not in tasks.allow"),
    ({"tasks": {"allow": []}}, "tasks", "'digits' is not in tasks.allow"),
    (
        {"tasks": {"allow": ["digits"], "fingerprints": {"digits": ["00" * 32]}}},
        "tasks",
        f"the code of 'digits', '{SOURCE}', is not in tasks.fingerprints",
    ),
    ({"algorithms": {"allow": ["fedavg"]}}, "algorithms", "'fedcm' is not in algorithms.allow"),
    ({"work": {"max_epochs": 4}}, "work", "work.max_epochs is 4, and the assignment has 5"),
    ({"work": {"max_steps": 9}}, "work", "work.max_steps is 9, and the assignment has 10"),
    ({"work": {"max_model_bytes": 999}}, "work", "work.max_model_bytes is 999, and the assignment has 1000"),
    ({"work": {"min_batch_size": 51}}, "work", "work.min_batch_size is 51, and the assignment has 50"),
    ({"work": {"min_examples": 101}}, "work", "work.min_examples is 101, and the assignment has 100"),
    ({"work": {"min_steps": 11}}, "work", "work.min_steps is 11, and the assignment has 10"),
    ({"work": {"min_clients": 4}}, "work", "work.min_clients is 4, and the assignment has 3"),
    (
        {"privacy": {"require": True}},
        "privacy",
        "privacy.require is true, and the run states no differential privacy",
    ),
    (
        {"privacy": {"max_epsilon": 8}},
        "privacy",
        "privacy.max_epsilon is 8, and the run states no differential privacy",
    ),
    (
        {"secure_aggregation": {"require": True}},
        "secure_aggregation",
        "secure_aggregation.require is true, and the coordinator would see this device's update alone",
    ),
]


@pytest.mark.parametrize(("policy", "rule", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_a_refusal_names_rule_limit_and_value(policy: dict[str, Any], rule: str, text: str) -> None:
    """What the site set, and what came."""
    assert refused(policy) == (rule, text)


def test_an_evaluation_is_judged_by_the_rules_that_concern_it() -> None:
    """Tasks, the model's size and the sharing of results; no method, no amount of training, no privacy."""
    assert refused({"algorithms": {"allow": []}, "privacy": {"require": True}}, EVALUATION) is None
    assert refused({"share": {"evaluations": False}}, EVALUATION) == (
        "share",
        "share.evaluations is false: no result of an evaluation leaves",
    )
    assert refused({"tasks": {"allow": ["x"]}}, EVALUATION) == ("tasks", "'digits' is not in tasks.allow")
    assert refused({"work": {"max_model_bytes": 5}}, EVALUATION) is not None


def test_unknown_fields_are_refused_unless_they_are_allowed() -> None:
    """A newer coordinator may demand what this version would not do. Without a policy file they are ignored."""
    request = Request("training", "digits", work=WORK, min_clients=3, unknown="Assignment.99")
    assert refused({}, request) == (
        "unknown_demands",
        "the assignment has fields that this version does not know: Assignment.99",
    )
    assert refused({"allow_unknown_demands": True}, request) is None
    assert refusal(NO_POLICY, request) is None


@given(
    examples=st.integers(1, 500),
    batch=st.integers(1, 2**32 - 1),
    amount=st.integers(1, 2**32 - 1),
    by_epochs=st.booleans(),
)
def test_the_work_is_that_of_the_batches(examples: int, batch: int, amount: int, by_epochs: bool) -> None:
    """Steps as fl_tasks.batches counts them; epochs are the passes that they make, however large the batch."""
    unit = {"epochs": amount} if by_epochs else {"steps": amount}
    work = work_of(ShardSize(examples), batch, epochs=unit.get("epochs"), steps=unit.get("steps"))
    assert work.steps == count_steps(examples, batch, **unit)
    assert work.epochs is not None
    assert work.examples is not None
    assert work.epochs * count_steps(examples, batch, epochs=1) == work.steps
    assert work.examples <= work.epochs * examples + examples
    if by_epochs:
        assert (work.epochs, work.examples) == (Fraction(amount), amount * examples)


def test_epochs_cannot_be_exceeded_by_steps() -> None:
    """1,001 steps on 100 examples in batches of 10 are more than 100 epochs."""
    request = Request(
        "training", "digits", algorithm="fedavg", work=work_of(ShardSize(100), 10, steps=1001), min_clients=3
    )
    text = "work.max_epochs is 100, and the assignment has 100.1"
    assert refused({"work": {"max_epochs": 100}}, request) == ("work", text)
    huge = Request("training", "digits", algorithm="fedavg", work=work_of(ShardSize(100), 2**32 - 1, steps=101))
    assert refused({"work": {"max_epochs": 100}}, huge) is not None


def test_the_metrics_know_every_rule_and_amount() -> None:
    """A label that is not declared would end the daemon's call."""
    assert {rule for _, rule, _ in REFUSED} | {"day", "coordinators", "share", "unknown_demands"} == set(POLICY_RULES)
    assert DAY_AMOUNTS == NAMES


def test_the_floors_of_a_file_without_them() -> None:
    """One example, one step, one client: refused by a policy that says nothing; a device without a policy has none."""
    work = work_of(ShardSize(1000), 1, steps=1)
    alone = Request("training", "digits", algorithm="fedavg", work=work, min_clients=1)
    assert refused({}, alone) == ("work", "work.min_clients is 3, and the assignment has 1")
    assert refused({"work": {"min_clients": 1}}, alone) == ("work", "work.min_examples is 16, and the assignment has 1")
    floors = {"min_clients": 1, "min_examples": 1}
    assert refused({"work": floors}, alone) == ("work", "work.min_batch_size is 4, and the assignment has 1")
    assert refusal(NO_POLICY, alone) is None
    older = Request("training", "digits", algorithm="fedavg", work=WORK, min_clients=0)
    assert refused({}, older) == ("work", "work.min_clients is 3, and the coordinator states none")


@pytest.mark.parametrize(
    ("method", "exchange", "expected"),
    [
        ("fedavg", 0, (4, Fraction(2), 20, 4)),
        ("mimelite", 0, (6, Fraction(3), 30, 4)),
        ("mime", 0, (2, Fraction(1), 10, 0)),
        ("mime", 1, (4, Fraction(2), 20, 4)),
        ("scaffold", 0, (4, Fraction(2), 20, 4)),
    ],
)
def test_a_full_gradient_counts_as_an_epoch(
    method: str, exchange: int, expected: tuple[int, Fraction, int, int]
) -> None:
    """Ten examples in batches of five, two epochs: steps, epochs, examples and local steps by the method's exchange."""
    training = training_pb2.LocalTraining(batch_size=5, local_epochs=2)
    work = ordered_work(training, algorithms.build(method).exchanges[exchange], ShardSize(10))
    assert (work.steps, work.epochs, work.examples, work.local_steps) == expected
    assert work.used == 10


def test_the_variate_of_the_first_option_is_a_full_gradient() -> None:
    """SCAFFOLD with option I computes it from a gradient over all examples."""
    training = training_pb2.LocalTraining(batch_size=5, local_steps=1)
    work = ordered_work(training, algorithms.build("scaffold", option="I").exchanges[0], ShardSize(10))
    assert (work.steps, work.examples, work.batch, work.used) == (3, 15, 5, 10)


def test_own_batches_count_as_registered() -> None:
    """Ten examples in four batches of the task's own, at most three in each: an epoch is four steps."""
    work = work_of(ShardSize(10, 4), 1000, epochs=2)
    assert (work.steps, work.epochs, work.examples) == (8, Fraction(2), 20)
    work = work_of(ShardSize(10, 4), 1000, steps=5)
    assert (work.steps, work.epochs, work.examples) == (5, Fraction(5, 4), 13)
