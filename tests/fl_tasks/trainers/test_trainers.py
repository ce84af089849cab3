"""Training scripts of Hugging Face and Lightning as tasks: the script alone trains the same model in one round."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_client.training.results import Interrupted
from fl_ops.simulate.reports import RoundResult
from fl_server.rounds.sampling import training_seed
from fl_tasks import Shard, TaskError, TrainContext
from fl_tasks.trainers import trainer_task
from fl_tasks.trainers.script import ScriptTask
from tests.marks import slow_except
from tests.processes import simulated
from tests.processes.process import HERE

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
SEED = 7
SCRIPTS = ["hugging_face", "lightning"]
LOCAL: dict[str, Any] = {"learning_rate": 0.01, "epochs": 2, "batch_size": 8}
ONE: dict[str, Any] = {
    "algorithm": {"name": "fedavg"},
    "stop": {"rounds": 1},
    "round": {"clients_per_round": 1, "min_clients": 1, "min_accepted": 1},
    "seed": SEED,
    "local": LOCAL,
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts are found as tasks."""
    monkeypatch.syspath_prepend(HERE)


def script(name: str) -> Any:
    """The module of a script."""
    return importlib.import_module(name)


def one_round(task: str, **sections: Any) -> tuple[RoundResult, nn.Module]:
    """A round of one client that has all examples: its result, and the model that was committed."""
    options = sections.pop("options", {})
    sections = {**ONE, "task": {"name": task, "options": options}, **sections}
    with simulated.simulation("one", clients=1, **sections) as simulation:
        [result] = list(simulation.rounds())
        model = script(task.split(":", maxsplit=1)[0]).Federated(**options).model()
        model.load_state_dict(simulation.model(), strict=False)
    return result, model


def same_values(model: nn.Module, alone: nn.Module) -> None:
    """But for one rounding: a round adds the difference of two models to the first of them."""
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_script_needs_at_most_five_more_lines(library: str) -> None:
    """Without blank lines and docstrings; nothing else of the script changes but the name of a function."""
    alone, federated = (
        [
            line
            for line in Path(HERE, f"{library}_{kind}.py").read_text(encoding="utf-8").splitlines()
            if line.strip() and not line.strip().startswith('"""')
        ]
        for kind in ("alone", "script")
    )
    changes = [line for line in difflib.ndiff(alone, federated) if line[0] in "+-"]
    assert len(federated) - len(alone) <= 5
    assert [line for line in changes if line[0] == "-" and not line.startswith("- def main(")] == []


def test_one_round_of_one_client_is_the_script_of_hugging_face_alone(tmp_path: Path) -> None:
    """Model and held-out accuracy are the same, with the script's schedule, clipping and optimizer."""
    start = tmp_path / "start"
    script("hugging_face_script").build().model.save_pretrained(start)
    result, model = one_round(
        "hugging_face_script:Federated", options={"start": str(start)}, local={**LOCAL, "max_gradient_norm": 1.0}
    )
    alone = script("hugging_face_alone").main(start, training_seed(SEED, 0, "edge-0") % 2**32)
    same_values(model, alone.model)
    logged = alone.evaluate()
    assert result.metrics["accuracy"] == pytest.approx(logged["eval_accuracy"], abs=1e-9)
    assert result.metrics["loss"] == pytest.approx(logged["eval_loss"], abs=1e-6)
    assert [set(epoch) for epoch in result.local_epochs] == [
        {"loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"}
    ] * 2
    assert result.local_epochs[1]["eval_accuracy"] == pytest.approx(logged["eval_accuracy"])


def test_one_round_of_one_client_is_the_script_of_lightning_alone(tmp_path: Path) -> None:
    """Model and held-out accuracy are the same, with the script's optimizer and schedule."""
    start = tmp_path / "start.pt"
    torch.save(script("lightning_script").Classifier().state_dict(), start)
    result, model = one_round("lightning_script:Federated", options={"start": str(start)})
    trainer, alone, *_ = script("lightning_alone").main(start=start, seed=training_seed(SEED, 0, "edge-0") % 2**32)
    same_values(model, alone)
    accuracy = trainer.callback_metrics["held_out_accuracy"].item()
    assert result.metrics["accuracy"] == pytest.approx(accuracy)
    assert [set(epoch) for epoch in result.local_epochs] == [
        {"loss", "train_loss", "train_loss_step", "train_loss_epoch", "held_out_accuracy"}
    ] * 2
    assert result.local_epochs[1]["held_out_accuracy"] == pytest.approx(accuracy)


def context_for(library: str, **changes: Any) -> tuple[ScriptTask, nn.Module, Any, TrainContext]:
    """A task, its model, its data and a round's context."""
    task = script(f"{library}_script").Federated()
    context = TrainContext(
        device=torch.device("cpu"), learning_rate=0.01, weight_decay=0.0, max_gradient_norm=0.0, batch_size=8,
        epochs=None, steps=5, seed=2**63 + 5, round=1, direction=None, batches=lambda: iter(()), on_step=lambda: None,
    )  # fmt: skip
    return task, task.model(), task.train_data(Shard(torch.arange(24))), replace(context, **changes)


@pytest.mark.parametrize("library", slow_except(SCRIPTS, "lightning"))
def test_a_round_has_the_steps_of_the_run_and_repeats_its_bits(library: str) -> None:
    """Rounds of a number of steps. The seed decides the order; the optimizer of an earlier round changes nothing."""
    steps = []
    task, model, data, context = context_for(library, on_step=lambda: steps.append(1))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    models = []
    for seed in (context.seed, 3, context.seed):
        model.load_state_dict(start)
        report = task.train(model, data, replace(context, seed=seed))
        assert (report.steps, report.examples, len(steps)) == (5, 24, 5)
        steps.clear()
        models.append({name: value.clone() for name, value in model.state_dict().items()})
    same = [all(torch.equal(value, models[0][name]) for name, value in other.items()) for other in models[1:]]
    assert same == [False, True]


@pytest.mark.parametrize("library", slow_except(SCRIPTS, "lightning"))
def test_the_end_of_a_rounds_work_passes_through_the_trainer(library: str) -> None:
    """The next round trains as if nothing had happened."""

    def interrupt() -> None:
        raise Interrupted

    task, model, data, context = context_for(library)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    task.train(model, data, context)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Interrupted):
        task.train(model, data, replace(context, on_step=interrupt))
    model.load_state_dict(start)
    task.train(model, data, context)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("library", SCRIPTS)
def test_several_processes_are_refused(library: str) -> None:
    """The message names the setting."""
    task, model, data, context = context_for(library, processes=2)
    with pytest.raises(TaskError, match=r"expected one process for a trainer .*, got 2: leave out .*`processes`"):
        task.train(model, data, context)


@pytest.mark.parametrize("library", SCRIPTS)
def test_another_device_is_refused(library: str) -> None:
    """Before anything is trained."""
    task, model, data, context = context_for(library, device=torch.device("meta"))
    with pytest.raises(TaskError, match="expected the script's trainer to train on meta, .*, got cpu"):
        task.train(model, data, context)


def test_a_folder_of_a_device_is_read_by_the_script(tmp_path: Path) -> None:
    """The parameter `folder` gets it. A script without one is refused for such a shard."""
    module = script("lightning_script")

    def build(folder: Path | None = None) -> tuple[Any, ...]:
        size = 60 if folder is None else int((folder / "size").read_text(encoding="utf-8"))
        built: tuple[Any, ...] = module.build(size)
        return built

    (tmp_path / "size").write_text("16", encoding="utf-8")
    task = trainer_task(build)()
    assert len(task.train_data(Shard(folder=tmp_path))) == 16
    assert len(task.train_data(Shard())) == 60
    assert len(task.train_data(Shard(torch.arange(7)))) == 7
    with pytest.raises(TaskError, match=r"expected build\(\) to have a parameter `folder` for the shard"):
        module.Federated().train_data(Shard(folder=tmp_path))


def made(change: Any) -> ScriptTask:
    """A task of the Lightning script whose results are changed."""
    module = script("lightning_script")

    def build() -> Any:
        return change(*module.build(), module)

    return trainer_task(build)()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(lambda *_: "trainer", r"to return a transformers.Trainer, or .* Lightning, got str", id="str"),
        pytest.param(lambda *_: (), "as the first of what the script's function returned, got an empty tuple", id="()"),
        pytest.param(lambda trainer, *_: (trainer, nn.Linear(1, 1)), r"got \(Trainer, Linear\)", id="no-module"),
        pytest.param(
            lambda trainer, net, *_: (trainer, net, [1]), r"expected a LightningDataModule, .* got \(list\)", id="data"
        ),
        pytest.param(
            lambda trainer, net, train, held, module: (trainer, module.lightning.LightningModule(), train, held),
            "expected LightningModule to have its learning rate as .* `lr` or `learning_rate`",
            id="rate",
        ),
        pytest.param(
            lambda trainer, net, train, *_: (
                trainer, net, torch.utils.data.DataLoader(train.dataset, sampler=[1, 0, 3])
            ),
            "that shuffles or not, got one with a list",
            id="sampler",
        ),
    ],
)  # fmt: skip
def test_what_cannot_train_in_rounds_is_refused(change: Any, why: str) -> None:
    """The message says what was expected of the script's function."""
    with pytest.raises(TaskError, match=why):
        made(change).train_data(Shard())


def test_an_optimizer_of_another_model_is_refused() -> None:
    """A Trainer makes its optimizer for the model of the round."""
    module = script("hugging_face_script")

    def build() -> Any:
        trainer = module.build()
        trainer.create_optimizer()
        return trainer

    with pytest.raises(TaskError, match="expected a Trainer that makes its optimizer and schedule itself"):
        trainer_task(build)().model()


def test_a_weight_decay_that_the_module_does_not_know_is_refused() -> None:
    """Otherwise the run's file would say what nobody does."""
    task, model, data, context = context_for("lightning", weight_decay=0.1)
    with pytest.raises(TaskError, match=r"`weight_decay` for the run's local.weight_decay = 0.1, got none"):
        task.train(model, data, context)


def test_metrics_of_other_outputs_need_a_function() -> None:
    """A classifier's are known. Of others the message names the argument; with it the function's are taken."""
    task = script("lightning_script").Federated()
    with pytest.raises(TaskError, match=r"got a tensor \[4, 3, 2\] and a tensor \[4, 3\]: give trainer_task"):
        task.metrics(torch.zeros(4, 3, 2), torch.zeros(4, 3, dtype=torch.long))

    def per_example(output: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": output.square().mean(dim=1)}

    own = trainer_task(script("lightning_script").build, metrics=per_example)()
    assert own.loss(torch.full((4, 2), 2.0), None).item() == 4.0
