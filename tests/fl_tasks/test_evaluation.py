"""Metrics averaged over examples, and statistics of batch normalisation that are computed anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_tasks import Examples, TaskError
from fl_tasks.data.forms import as_data
from fl_tasks.evaluation import CPU_BATCH, DEVICE_BATCH, estimate_statistics, evaluate
from tests.fl_tasks.tiny import Tiny
from tests.processes import tiny_task


def test_the_mean_is_over_examples_not_batches(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """Values 0 to 4 have mean 2; the mean of the batch means 0.5, 2.5 and 4 would be 2.33."""
    monkeypatch.setattr(tiny, "metrics", lambda output, target: {"value": target.float()})
    assert evaluate(tiny, nn.Identity(), Examples(torch.zeros(5), torch.arange(5)), batch_size=2) == {"value": 2.0}


@pytest.mark.parametrize(("device", "size"), [("cpu", CPU_BATCH), ("meta", DEVICE_BATCH)])
def test_batches_are_small_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch, tiny: Tiny, device: str, size: int) -> None:
    """Examples of three batches are evaluated in batches of the device's size. A meta device stands for another one."""
    sizes: list[int] = []

    def metrics(output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        sizes.append(len(target))
        return {"value": torch.zeros(len(target))}

    monkeypatch.setattr(tiny, "metrics", metrics)
    examples = Examples(torch.zeros(2 * size + 1, 1), torch.zeros(2 * size + 1))
    evaluate(tiny, nn.Linear(1, 1, device=device), examples)
    assert sizes == [size, size, 1]


def test_sums_are_kept_in_float64(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """In float32, 2^24 + 1 + 1 is 2^24; its third part differs from the true one by 0.667."""
    values = torch.tensor([2.0**24, 1.0, 1.0])
    monkeypatch.setattr(tiny, "metrics", lambda output, target: {"value": target})
    assert evaluate(tiny, nn.Identity(), Examples(values, values), batch_size=1)["value"] == (2**24 + 2) / 3


def test_modes_are_restored_module_by_module(tiny: Tiny) -> None:
    """During evaluation all modules are in evaluation mode; afterwards each is in the mode it had."""
    model = nn.Sequential(nn.Dropout(), nn.Linear(1, 2))
    model.train()
    model[0].eval()
    during: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: during.append(module.training))
    evaluate(tiny, model, tiny.eval_data())
    assert during == [False]
    assert (model.training, model[0].training, model[1].training) == (True, False, True)


def test_modes_are_restored_after_an_error(tiny: Tiny) -> None:
    """A task that raises leaves the model in training mode."""
    model = tiny.model()
    with pytest.raises(TaskError, match="raised RuntimeError"):
        evaluate(tiny, model, Examples(torch.zeros(2, 99), torch.zeros(2).long()))
    assert model.training


def test_no_gradients_are_made(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """The metrics' tensors carry no graph."""
    needs: list[bool] = []

    def metrics(output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        needs.append(output.requires_grad)
        return {"value": output[:, 0]}

    monkeypatch.setattr(tiny, "metrics", metrics)
    evaluate(tiny, tiny.model(), tiny.eval_data())
    assert needs == [False]


def test_no_examples_is_an_error(tiny: Tiny) -> None:
    """There is no mean of nothing."""
    with pytest.raises(TaskError, match="at least one example to evaluate on"):
        evaluate(tiny, tiny.model(), tiny.examples[:0])


@pytest.mark.parametrize(
    ("value", "came"), [(torch.tensor(0.5), r"shape \[\]"), (0.5, "float"), (torch.zeros(12, 1), r"shape \[12, 1\]")]
)
def test_metrics_give_one_value_for_each_example(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny, value: object, came: str
) -> None:
    """A metric that is already averaged is refused, with its name and shape."""
    monkeypatch.setattr(tiny, "metrics", lambda output, target: {"f1": value})
    with pytest.raises(TaskError, match=rf'"f1" as a tensor .* shape \[12\], got {came}'):
        evaluate(tiny, tiny.model(), tiny.eval_data())


@pytest.mark.parametrize(("values", "came"), [(None, "NoneType"), ([torch.zeros(12)], "list"), (0.5, "float")])
def test_metrics_that_are_no_dict_are_an_error_of_the_task(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny, values: object, came: str
) -> None:
    """The message says what was expected and what came."""
    monkeypatch.setattr(tiny, "metrics", lambda output, target: values)
    with pytest.raises(TaskError, match=rf"metrics\(\): expected a dict of names .*, got {came}"):
        evaluate(tiny, tiny.model(), tiny.eval_data())


@pytest.mark.parametrize(
    "name",
    ["", 3, None, "loss/", "/loss", "a//b", "a/../b", "a\nb", "a\x1b[2J", "\ud800", " loss", "x" * 65,
     "clients_loss", "loss_without_personal"],
)  # fmt: skip
def test_names_of_metrics_are_checked(monkeypatch: pytest.MonkeyPatch, tiny: Tiny, name: Any) -> None:
    """A name that breaks tables, terminals, MLflow or the project's own names is refused."""
    monkeypatch.setattr(tiny, "metrics", lambda output, target: {name: output[:, 0]})
    with pytest.raises(TaskError, match=r"metrics\(\): expected names"):
        evaluate(tiny, tiny.model(), tiny.eval_data())


@pytest.mark.parametrize("name", ["event", "run", "loss/train", "top-5 (%)", "Präzision"])
def test_other_names_are_the_tasks_own(monkeypatch: pytest.MonkeyPatch, tiny: Tiny, name: str) -> None:
    """Every printable name may be used, also one of a field of the log."""
    monkeypatch.setattr(tiny, "metrics", lambda output, target: {name: torch.ones(len(output))})
    assert evaluate(tiny, tiny.model(), tiny.eval_data()) == {name: 1.0}


def test_metrics_are_the_same_for_every_batch(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """A metric that only some batches have has no mean."""
    monkeypatch.setattr(tiny, "metrics", lambda output, target: {f"class {int(target[0])}": output[:, 0]})
    with pytest.raises(TaskError, match=r"the metrics \['class 0'\] of every batch, got \['class 1'\]"):
        evaluate(tiny, tiny.model(), tiny.eval_data(), batch_size=6)


INPUTS = torch.arange(24.0).view(8, 3) ** 1.3


def mean_of(model: nn.Sequential) -> torch.Tensor:
    """The running mean of its first layer."""
    found: torch.Tensor = model.state_dict()["0.running_mean"]
    return found


def a_model() -> nn.Sequential:
    """A normalisation that learns its statistics, and one that a task keeps as it is."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    return model


def data(count: int = 8) -> Examples:
    """Some examples; labels are not read."""
    return Examples(INPUTS[:count], torch.zeros(count, dtype=torch.int64))


def test_they_are_the_means_over_the_batches() -> None:
    """Mean and unbiased variance of two batches of four, each batch alike; nothing else of the model changes."""
    model = a_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert estimate_statistics(tiny_task.Tiny(), model, as_data(data()), 4) == 1
    after = model.state_dict()
    batches = INPUTS.split(4)
    torch.testing.assert_close(after["0.running_mean"], torch.stack([batch.mean(0) for batch in batches]).mean(0))
    torch.testing.assert_close(after["0.running_var"], torch.stack([batch.var(0) for batch in batches]).mean(0))
    others = before.keys() - {"0.running_mean", "0.running_var"}
    assert all(torch.equal(after[name], before[name]) for name in others)
    assert [module.training for module in model] == [True, False, True]
    assert model[0].momentum == 0.1


def test_the_result_depends_on_the_examples_alone() -> None:
    """Not on the statistics before: a second estimate changes no bit."""
    model = a_model()
    estimate_statistics(tiny_task.Tiny(), model, as_data(data()), 4)
    first = mean_of(model).clone()
    estimate_statistics(tiny_task.Tiny(), model, as_data(data()), 4)
    assert torch.equal(mean_of(model), first)


def test_one_example_has_no_statistics() -> None:
    """A last batch of one is left out, and a single example is refused."""
    model = a_model()
    estimate_statistics(tiny_task.Tiny(), model, as_data(data(5)), 4)
    torch.testing.assert_close(mean_of(model), INPUTS[:4].mean(0))
    with pytest.raises(TaskError, match="two examples or more"):
        estimate_statistics(tiny_task.Tiny(), model, as_data(data(1)), 4)


def test_a_model_without_statistics_is_left_alone() -> None:
    """Its data is not read."""
    assert estimate_statistics(tiny_task.Tiny(), nn.Linear(3, 2), as_data(data()), 4) == 0
