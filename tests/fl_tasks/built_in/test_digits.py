"""The digits task."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fl_tasks import Examples, Shard, TaskError, fingerprint, load_task, training_labels
from fl_tasks.batches import batches, seed_everything
from fl_tasks.built_in.digits import Digits
from fl_tasks.evaluation import evaluate


@pytest.fixture
def digits() -> Any:
    """The task with default options."""
    return load_task("digits")


def test_every_scan_is_trained_on_or_held_out(digits: Digits) -> None:
    """1,437 and 360 scans, [1, 8, 8] in [0, 1], no scan in both: all 1,797 are different."""
    train, held_out = digits.train_data(Shard()), digits.eval_data()
    assert (train.inputs.shape, held_out.inputs.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (train.inputs.min().item(), train.inputs.max().item()) == (0.0, 1.0)
    assert len({scan.numpy().tobytes() for scan in [*train.inputs, *held_out.inputs]}) == 1797


def test_each_digit_is_held_out_alike(digits: Digits) -> None:
    """One in five of each digit's 174 to 183 scans is 35, 36 or 37."""
    assert {35, 36, 37} >= set(digits.eval_data().targets.bincount(minlength=10).tolist())


def test_the_split_does_not_depend_on_seeds(digits: Digits) -> None:
    """Another seed of torch gives the same held-out scans."""
    torch.manual_seed(123)
    assert torch.equal(digits.eval_data().inputs, cast(Any, load_task("digits")).eval_data().inputs)


def test_a_shard_is_cut_by_its_indices(digits: Digits) -> None:
    """Indices refer to the training set with the labels of training_labels."""
    part = digits.train_data(Shard(torch.tensor([5, 900])))
    assert training_labels(digits)[[5, 900]].tolist() == part.targets.tolist()


def test_clients_may_keep_a_part_for_evaluation() -> None:
    """With a fraction of 0.25, 25 of 100 examples are evaluated on and the other 75 trained on; indices still fit."""
    task: Any = load_task("digits", {"client_eval_fraction": 0.25})
    shard = Shard(torch.arange(100, 200))
    train, evaluation = task.train_data(shard), task.eval_data(shard)
    assert (len(train), len(evaluation)) == (75, 25)
    assert sorted([*train.targets, *evaluation.targets]) == sorted(training_labels(task)[100:200])


def test_clients_keep_nothing_by_default(digits: Digits) -> None:
    """Without the option a shard has no held-out part."""
    assert len(digits.eval_data(Shard(torch.arange(100)))) == 0


def test_the_model_learns(digits: Digits) -> None:
    """Three epochs of plain SGD bring the held-out accuracy from chance to over 80 %."""
    seed_everything(0)
    model = digits.model()
    before = evaluate(digits, model, digits.eval_data())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for inputs, targets in batches(digits.train_data(Shard()), 16, seed=0, epochs=3):
        optimizer.zero_grad()
        digits.loss(model(inputs), targets).backward()
        optimizer.step()
    after = evaluate(digits, model, digits.eval_data())
    assert before["accuracy"] < 0.3
    assert after["accuracy"] > 0.8
    assert after["loss"] < before["loss"]


@pytest.mark.slow  # numbers, shapes and values of the scans are checked above
def test_the_scans_are_those_of_scikit_learn(digits: Digits) -> None:
    """Read from its file, they are what the library gives: each scan with its digit, as it always was."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - a second, which other workers need not spend

    scans = load_digits()
    theirs = Examples(torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(scans.target))
    by_bytes = {scan.numpy().tobytes(): int(digit) for scan, digit in zip(theirs.inputs, theirs.targets, strict=True)}
    train = digits.train_data(Shard())
    assert [by_bytes[scan.numpy().tobytes()] for scan in train.inputs] == train.targets.tolist()
    assert (train.inputs.dtype, train.targets.dtype) == (theirs.inputs.dtype, theirs.targets.dtype)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command that installs what the demo needs."""
    monkeypatch.setattr("fl_tasks.built_in.digits.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install 'impetus-fl\[digits\]'"):
        load_task("digits")


def test_its_fingerprint_is_that_of_its_module(digits: Digits) -> None:
    """Digits and the vision tasks have different sources."""
    assert fingerprint(digits) != fingerprint(load_task("cifar10"))
