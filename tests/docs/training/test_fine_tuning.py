"""docs/training/fine-tuning.md: its tasks are run with small random models; no weights are fetched."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.forks import Forked, Program
from tests.processes.process import ROOT

WITHIN_S = 500.0
"""Enough for a busy machine, and no claim about speed."""
PAGE = (ROOT / "docs/training/fine-tuning.md").read_text(encoding="utf-8")
TASK, STORIES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RUN, DEVICE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
IMPORTED = "from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling\n"
"""What the second class needs beside the imports of the first."""


def environment(folder: Path) -> dict[str, str]:
    """Without a network, and with the caches of the libraries in the test's folder."""
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own}


def python(folder: Path, module: str, *arguments: str) -> None:
    """Run a module in the folder, in a process that has imported torch already. It must succeed."""
    out, err = folder / "out", folder / "err"
    program = Forked(Program(module, arguments, environment(folder), folder, out, err))
    assert program.wait(WITHIN_S) == 0, out.read_text() + err.read_text()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: the page's files, a small BERT, and reviews."""
    folder = tmp_path_factory.mktemp("bert")
    python(folder, "tests.docs.training.checkpoints", str(folder), "bert")
    (folder / "sentiment.py").write_text(TASK)
    (folder / "sentiment.toml").write_text(RUN)
    return folder


def simulate(folder: Path) -> dict[str, Any]:
    """The command of the page. Returns the result's file."""
    python(folder, "fl_ops", "simulate", "sentiment.toml", "--out", "results")
    result: dict[str, Any] = json.loads((folder / "results" / "seed-0" / "result.json").read_text())
    return result


def test_the_task_has_the_lines_that_the_page_states() -> None:
    """At most forty, all of them counted but the empty ones at its ends."""
    stated = re.search(r"## A model of Hugging Face in (\d+) lines", PAGE)
    assert stated
    assert int(stated[1]) == len(TASK.strip().splitlines()) <= 40


def test_the_page_has_a_device_with_a_file_of_its_own() -> None:
    """The options of the device are those of the task's class."""
    (kind,) = [node for node in ast.parse(TASK).body if isinstance(node, ast.ClassDef)]
    init = next(node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    options = re.findall(r"(\w+) = \"/", DEVICE)
    assert options == [argument.arg for argument in init.args.args[1:]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_adapters_learn_and_alone_are_sent(bert: Path) -> None:
    """The loss falls over the rounds. A client sends 4 matrices B of [16, 8] and the head of 34 values, as float32."""
    rounds = simulate(bert)["rounds"]
    losses = [done["metrics"]["loss"] for done in rounds]
    assert losses[-1] < losses[0]
    assert {done["bytes_up"] / len(done["accepted"]) for done in rounds} == {4 * (4 * 16 * 8 + 34)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [8, 0])
def test_a_language_model_with_tied_weights(tmp_path: Path, lora: int) -> None:
    """A small GPT-2 learns with adapters and whole; the tied matrix is sent once, and exported by both names."""
    python(tmp_path, "tests.docs.training.checkpoints", str(tmp_path), "gpt2")
    (tmp_path / "sentiment.py").write_text(IMPORTED + TASK + "\n\n" + STORIES)
    run = RUN.replace('"sentiment:Sentiment"', f'"sentiment:Stories"\noptions = {{ lora = {lora} }}')
    (tmp_path / "sentiment.toml").write_text(run)
    rounds = simulate(tmp_path)["rounds"]
    assert rounds[-1]["metrics"]["loss"] < rounds[0]["metrics"]["loss"]
    tensors = load_file(tmp_path / "results" / "seed-0" / "model.safetensors")
    tied = {name: tensors.pop(name) for name in list(tensors) if "lm_head" in name}
    (output,), (input_,) = tied.values(), [value for name, value in tensors.items() if "wte" in name]
    assert torch.equal(output, input_)
    sent = sum(value.numel() for name, value in tensors.items() if not lora or ".lora_B." in name)
    assert {done["bytes_up"] / len(done["accepted"]) for done in rounds} == {4 * sent}
