"""Metrics that are no mean over examples, against scikit-learn on the pooled data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_tasks import Examples, Metric, TaskError
from fl_tasks.evaluation import evaluate, totals
from fl_tasks.metrics import declared_directions, declared_metrics
from fl_tasks.summed_metrics import MAX_SUM_VALUES, Pool, finite_values_of, plain
from tests.processes.scored_task import CLASSES, Scored


@pytest.fixture(scope="module")
def torchmetrics() -> Any:
    """The package. Its import takes five seconds, which the collection of each worker would take."""
    return pytest.importorskip("torchmetrics")


def model() -> nn.Module:
    """One with an imperfect answer to each point."""
    torch.manual_seed(5)
    return Scored().model()


def total(output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    """One sum."""
    return {"a": output.sum() + 0 * target.sum()}


def answers(examples: Examples) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Tensor]:
    """Labels, answers and scores of the model."""
    with torch.no_grad():
        scores = model()(examples.inputs)
    return examples.targets.numpy(), scores.argmax(1).numpy(), scores


def expected(examples: Examples) -> dict[str, float]:
    """By scikit-learn."""
    from sklearn import metrics as sklearn  # noqa: PLC0415 - slow

    labels, answered, scores = answers(examples)
    recalls = sklearn.recall_score(labels, answered, average=None)
    return {
        "f1_macro": sklearn.f1_score(labels, answered, average="macro"),
        "perplexity": math.exp(sklearn.log_loss(labels, scores.double().softmax(1).numpy(), labels=range(CLASSES))),
        **{f"recalls/{number}": float(recalls[number]) for number in range(CLASSES)},
    }


@pytest.mark.parametrize("batch_size", [7, 101])
def test_values_are_those_of_all_examples(batch_size: int) -> None:
    """Not means over batches: F1, recall of each class and perplexity for any size of batches."""
    examples = Scored().eval_data()
    found = evaluate(Scored(), model(), examples, batch_size)
    assert {name: found[name] for name in expected(examples)} == pytest.approx(expected(examples), rel=1e-6)
    assert found["misses"] == pytest.approx(1 - found["accuracy"])


def test_values_over_clients_are_those_of_the_pooled_examples() -> None:
    """The sums travel as plain values, in order; the value of each client is its own."""
    examples, task, pool = Scored().eval_data(), Scored(), Pool()
    for part in (examples[:20], examples[20:75], examples[75:]):
        found = totals(task, model(), part)
        pool.add(json.loads(json.dumps(plain(found.sums))))
        own = finite_values_of(task, found.sums)
        assert own["f1_macro"] == pytest.approx(expected(part)["f1_macro"], rel=1e-6)
    values, problems = pool.values(task)
    assert values == pytest.approx(expected(examples), rel=1e-6)
    assert (problems, pool.left_out) == ([], 0)


class WithTorchmetrics(Scored):
    """The same examples."""

    def __init__(self, *declared: Metric) -> None:
        super().__init__()
        self.declared_metrics = declared


def test_torchmetrics_objects_are_taken_as_they_are(torchmetrics: Any) -> None:
    """F1, binned AUROC and R2 of all examples, for small batches, and over two clients."""
    from sklearn import metrics as sklearn  # noqa: PLC0415 - slow

    declared = (
        Metric("f1", torchmetric=torchmetrics.classification.MulticlassF1Score(CLASSES, average="macro")),
        Metric("auroc", torchmetric=torchmetrics.classification.MulticlassAUROC(CLASSES, thresholds=1001)),
        Metric("r2", torchmetric=torchmetrics.R2Score(), inputs=lambda output, target: (output[:, 0], target.float())),
        Metric("mse", torchmetric=torchmetrics.MeanSquaredError(), inputs=lambda output, _: output[:, :2].unbind(1)),
    )
    task, examples = WithTorchmetrics(*declared), Scored().eval_data()
    labels, answered, scores = answers(examples)
    wanted = {
        "f1": sklearn.f1_score(labels, answered, average="macro"),
        "auroc": sklearn.roc_auc_score(labels, scores.double().softmax(1).numpy(), multi_class="ovr"),
        "r2": sklearn.r2_score(labels, scores[:, 0]),
        "mse": sklearn.mean_squared_error(scores[:, 0], scores[:, 1]),
    }
    found = evaluate(task, model(), examples, 9)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=2e-3)
    pool = Pool()
    for part in (examples[:40], examples[40:]):
        pool.add(plain(totals(task, model(), part).sums))
    assert pool.values(task)[0] == pytest.approx({name: found[name] for name in wanted}, rel=1e-6)
    assert declared_directions(task) == {"f1": False, "auroc": False, "r2": False, "mse": True}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda package: package.classification.BinaryAUROC(), r"lists preds, target, .* would leave the device"),
        (lambda package: package.CatMetric(), "lists value"),
        (lambda package: package.PearsonCorrCoef(), "got others: corr_xy"),
        (lambda package: package.MaxMetric(), "got others: max_value"),
        (lambda package: package.MetricCollection([package.MeanSquaredError()]), "without states of its own"),
        (lambda _: nn.Linear(1, 1), "without states of its own"),
    ],
)
def test_states_that_are_not_reduced_by_sum_are_refused_by_name(torchmetrics: Any, made: Any, why: str) -> None:
    """Lists of predictions and labels would leave the device."""
    with pytest.raises(TaskError, match=f"the metric 'it' .*{why}"):
        declared_metrics(WithTorchmetrics(Metric("it", torchmetric=made(torchmetrics))))


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        (["mae"], r"a list or tuple of fl_tasks.Metric"),
        ((Metric("loss/"),), "parts between slashes"),
        ((Metric("mae"), Metric("mae")), "each metric once"),
        ((Metric("f1", sums=lambda output, target: {}),), "sums and value as two functions"),
    ],
)
def test_declarations_are_checked(declared: Any, why: str) -> None:
    """A task with a wrong one is not loaded."""
    task = Scored()
    task.declared_metrics = declared
    with pytest.raises(TaskError, match=why):
        declared_metrics(task)


@pytest.mark.parametrize(
    ("sums", "value", "why"),
    [
        (lambda output, target: [1], len, "expected sums.. to return a dict of tensors"),
        (lambda output, target: {"a": 3.0}, len, "expected sums.. to return a dict of tensors"),
        (lambda output, target: {"a": output}, len, "the same names and shapes of every batch"),
        (lambda output, target: {"a": torch.ones(MAX_SUM_VALUES + 1)}, len, "at most 16,384 numbers"),
        (
            lambda output, target: {"a": output.sum()},
            lambda sums: sums["b"],
            "the value of the metric 'it' raised KeyError",
        ),
        (
            lambda output, target: {"a": output.sum()},
            lambda sums: None,
            "the value of the metric 'it' raised TypeError",
        ),
        (total, lambda sums: {"x" * 64: 1.0}, "names of 1 to 64"),
        (total, lambda sums: torch.zeros(65), "at most 64 metrics"),
    ],
)
def test_wrong_sums_and_values_are_errors_of_the_task(sums: Any, value: Any, why: str) -> None:
    """The message names the metric."""
    task = WithTorchmetrics(Metric("it", sums=sums, value=value))
    with pytest.raises(TaskError, match=why):
        evaluate(task, model(), task.eval_data(), 40)


def test_a_metric_comes_from_one_place() -> None:
    """A name that metrics() reports too would hide one of the two."""
    task = WithTorchmetrics(Metric("loss", sums=total, value=lambda sums: sums["a"]))
    with pytest.raises(TaskError, match="the metric 'loss': .* got it from both"):
        evaluate(task, model(), task.eval_data())


def test_a_client_with_few_examples_has_no_value_and_counts_in_the_pool() -> None:
    """The recall of a class without an example is NaN: it is left out for the client, and known over all."""
    examples, task, pool = Scored().eval_data(), Scored(), Pool()
    one = examples[:1]
    found = totals(task, model(), one)
    assert sorted(name for name in finite_values_of(task, found.sums) if "recalls" in name) == [
        f"recalls/{int(one.targets[0])}"
    ]
    for part in (one, examples[1:]):
        pool.add(plain(totals(task, model(), part).sums))
    assert pool.values(task)[0] == pytest.approx(expected(examples), rel=1e-6)


def test_a_client_with_other_sums_is_left_out() -> None:
    """It cannot spoil the values of the others, and what the task's code raises ends nothing."""
    examples, task, pool = Scored().eval_data(), Scored(), Pool()
    pool.add([("f1_macro", "counts", [1], [5.0])])
    for part in (examples[:50], examples[50:]):
        pool.add(plain(totals(task, model(), part).sums))
    assert pool.left_out == 1
    assert pool.values(task)[0] == pytest.approx(expected(examples), rel=1e-6)
    wrong = Pool()
    wrong.add([("f1_macro", "counts", [1], [5.0]), ("other", "a", [], [1.0])])
    values, problems = wrong.values(task)
    assert (values, len(problems)) == ({}, 2)


def test_the_tasks_own_object_is_not_used(torchmetrics: Any) -> None:
    """Two evaluations may run at the same time."""
    own = torchmetrics.classification.MulticlassF1Score(CLASSES)
    evaluate(WithTorchmetrics(Metric("f1", torchmetric=own)), model(), Scored().eval_data())
    assert own._update_count == 0


def test_sums_and_directions_of_a_task(torchmetrics: Any) -> None:
    """What a task declares goes before what a torchmetrics object says of itself."""
    own = torchmetrics.MeanSquaredError()
    declared: Mapping[str, bool] = declared_directions(
        WithTorchmetrics(Metric("a", torchmetric=own), Metric("b", lower_is_better=False, torchmetric=own), Metric("c"))
    )
    assert declared == {"a": True, "b": False}
