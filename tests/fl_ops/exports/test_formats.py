"""The formats of an exported model: whole, trainable and adapter, from runs that send frozen parameters or do not."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_ops.errors import Refused, UsageError
from fl_ops.exports.download import frozen_digest
from fl_ops.exports.formats import task_of, write_adapter, write_estimated, write_trained, write_whole
from fl_ops.files import Target
from fl_server.aggregation.engine import Engine
from fl_server.run_settings.spec import from_values
from fl_server.store.checkpoints import Checkpoints
from fl_tasks import Task
from tests.fl_ops.exports.adapted_tasks import Peft, Tied, base
from tests.processes.backbone_task import Adapted, write_backbone
from tests.processes.tiny_task import Tiny

SEED = 5


def exported(task: Task, folder: Path, frozen: str = "local") -> Path:
    """The first model of a run of the task, as a coordinator exports it."""
    config = from_values({"task": {"name": "tiny", "frozen": frozen}, "seed": SEED})
    engine = Engine(config, task)
    checkpoint = engine.snapshots.checkpoint(engine.first(), {})
    return Checkpoints(folder / "checkpoints").save("tiny", -1, checkpoint) / "model.safetensors"


@pytest.fixture
def adapted(tmp_path: Path) -> Adapted:
    """A frozen matrix from a file, and trained adapters."""
    return Adapted(str(write_backbone(tmp_path / "backbone.safetensors", 12)))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["adapted", "tied"])
def test_a_whole_model_loads_strictly_and_is_that_of_a_run_that_sends(
    task: str, adapted: Adapted, tmp_path: Path
) -> None:
    """The file has every name of the state_dict, tied ones too, and the values of the run with frozen = "send"."""
    made: Task = adapted if task == "adapted" else Tied()
    file = exported(made, tmp_path)
    write_whole(file, tmp_path / "whole", made)
    whole, sent = load_file(tmp_path / "whole"), load_file(exported(made, tmp_path / "sent", "send"))
    made.model().load_state_dict(whole, strict=True)
    assert frozen_digest(file).startswith("blake3:")
    assert frozen_digest(tmp_path / "whole") == ""
    assert whole.keys() == sent.keys() > load_file(file).keys()
    assert all(torch.equal(whole[name], sent[name]) for name in sent)


@pytest.mark.slow
def test_the_trainable_part_of_a_run_that_sends_is_the_file_of_one_that_does_not(tmp_path: Path) -> None:
    """Trainable parameters and buffers, under all names of tied ones."""
    write_trained(exported(Tied(), tmp_path, "send"), tmp_path / "trained", Tied())
    trained, local = load_file(tmp_path / "trained"), load_file(exported(Tied(), tmp_path / "local"))
    assert trained.keys() == local.keys()
    assert {"between.0.weight", "again.weight", "between.1.running_mean"} <= trained.keys()
    assert all(torch.equal(trained[name], local[name]) for name in local)


@pytest.mark.slow
def test_other_frozen_parameters_are_refused(tmp_path: Path) -> None:
    """A task with another frozen part than the run's gives no file that looks whole; both digests are named."""
    file = exported(Tied(), tmp_path)
    with pytest.raises(Refused, match=r"expected the frozen parameters of the run, blake3:\w+, got blake3:\w+ from"):
        write_whole(file, tmp_path / "whole", Tied(factor=2.0))
    assert not (tmp_path / "whole").exists()


def test_a_model_of_another_task_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    """The first name that does not fit is in the message."""
    with pytest.raises(Refused, match="does not fit the task's model: 'table.weight' is missing"):
        write_trained(exported(adapted, tmp_path, "send"), tmp_path / "trained", Tied())


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "injected"])
@pytest.mark.parametrize("frozen", ["send", "local"])
def test_an_adapter_loads_with_peft(tmp_path: Path, frozen: str, wrapped: bool) -> None:
    """PeftModel.from_pretrained on the base gives the outputs of the exported model."""
    pytest.importorskip("peft")
    task = Peft(wrapped=wrapped)
    file = exported(task, tmp_path, frozen)
    write_adapter(file, Target(tmp_path / "adapter"), task)
    write_whole(file, tmp_path / "whole", task)
    loaded = importlib.import_module("peft").PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    model = task.model()
    model.load_state_dict(load_file(tmp_path / "whole"), strict=True)
    inputs = task.eval_data().inputs
    assert torch.equal(loaded(inputs), model(inputs))
    assert not torch.equal(loaded(inputs), base()(inputs))
    assert set(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == {
        "base_model.model.0.lora_A.weight",
        "base_model.model.0.lora_B.weight",
    }


@pytest.mark.slow
def test_an_adapter_without_peft_has_the_tasks_configuration(adapted: Adapted, tmp_path: Path) -> None:
    """The trained parameters by peft's names, and adapter_config() as JSON."""
    write_adapter(exported(adapted, tmp_path), Target(tmp_path / "adapter"), adapted)
    config: dict[str, Any] = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config == {**adapted.adapter_config(), "inference_mode": True}
    names = {"base_model.model.lora_A.weight", "base_model.model.lora_B.weight"}
    assert set(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == names


def test_a_task_without_an_adapter_is_refused(tmp_path: Path) -> None:
    """The message names the method that the task needs, and no folder appears."""
    with pytest.raises(UsageError, match=r"a task with adapter_config\(\), .*; Tiny has neither"):
        write_adapter(exported(Tiny(), tmp_path, "send"), Target(tmp_path / "adapter"), Tiny())
    assert not (tmp_path / "adapter").exists()


def test_a_name_from_the_coordinator_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that lies here is imported only if a file of the user names it."""
    (tmp_path / "planted_task.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="--config with a run's file"):
        task_of("planted_task:Task", {}, trusted=False)
    assert "planted_task" not in sys.modules
    assert task_of("tests.processes.tiny_task:Tiny", {}, trusted=True).version


def test_statistics_of_a_model_are_estimated_from_the_tasks_examples(tmp_path: Path) -> None:
    """Only the running statistics change, and the file loads strictly."""
    task = Tiny("batchnorm")
    file = exported(task, tmp_path, "send")
    write_estimated(file, tmp_path / "estimated", task)
    before, after = load_file(file), load_file(tmp_path / "estimated")
    task.model().load_state_dict(after, strict=True)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"1.running_mean", "1.running_var"}
