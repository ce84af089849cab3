"""Each rule alone: what it accepts, what it refuses, and the text of the refusal."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_client.monitoring.metrics import DAY_AMOUNTS, POLICY_RULES
from fl_client.policy.config import NO_POLICY, Policy
from fl_client.policy.rules import Request, Work, refusal, work_of
from fl_client.policy.usage import NAMES
from tasks.batches import count_steps

SOURCE = "sha256:" + "ab" * 32
TRAINING = Request("training", "digits", SOURCE, "fedcm", work=Work(10, Fraction(5), 500), model_bytes=1000)
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
    request = Request("training", "digits", unknown="Assignment.99")
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
    """Steps as tasks.batches counts them; epochs are the passes that they make, however large the batch."""
    unit = {"epochs": amount} if by_epochs else {"steps": amount}
    work = work_of(examples, batch, **unit)
    assert work.steps == count_steps(examples, batch, **unit)
    assert work.epochs is not None
    assert work.examples is not None
    assert work.epochs * count_steps(examples, batch, epochs=1) == work.steps
    assert work.examples <= work.epochs * examples + examples
    if by_epochs:
        assert (work.epochs, work.examples) == (Fraction(amount), amount * examples)


def test_epochs_cannot_be_exceeded_by_steps() -> None:
    """1,001 steps on 100 examples in batches of 10 are more than 100 epochs."""
    request = Request("training", "digits", algorithm="fedavg", work=work_of(100, 10, steps=1001))
    text = "work.max_epochs is 100, and the assignment has 100.1"
    assert refused({"work": {"max_epochs": 100}}, request) == ("work", text)
    huge = Request("training", "digits", algorithm="fedavg", work=work_of(100, 2**32 - 1, steps=101))
    assert refused({"work": {"max_epochs": 100}}, huge) is not None


def test_the_metrics_know_every_rule_and_amount() -> None:
    """A label that is not declared would end the daemon's call."""
    assert {rule for _, rule, _ in REFUSED} | {"day", "coordinators", "share", "unknown_demands"} == set(POLICY_RULES)
    assert DAY_AMOUNTS == NAMES


def test_own_batches_count_as_registered() -> None:
    """Ten examples in four batches of the task's own, at most three in each: an epoch is four steps."""
    work = work_of(10, 1000, epochs=2, own_batches=4)
    assert (work.steps, work.epochs, work.examples) == (8, Fraction(2), 20)
    work = work_of(10, 1000, steps=5, own_batches=4)
    assert (work.steps, work.epochs, work.examples) == (5, Fraction(5, 4), 13)
