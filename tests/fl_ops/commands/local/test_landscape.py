"""`fl landscape`: its values, its files, and its errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from algorithms.sharpness import MeanLoss, filter_normalised, largest_eigenvalue, trace
from fl_ops.landscape.files import distinct
from fl_ops.landscape.surface import Sample, labels_of
from fl_tasks import Examples, Shard, load_task
from tests.fl_ops.conftest import Fl

pytestmark = pytest.mark.usefixtures("points_task")
RUN = """
[task]
name = "points:Points"
[algorithm]
name = "fedavg"
[stop]
rounds = 1
[simulation]
clients = 3
"""
SMALL = ("--points", "3", "--examples", "40")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run's file."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def a_model(path: Path, seed: int = 0, **tensors: torch.Tensor) -> Path:
    """A model of the task as a file, with some of its tensors replaced."""
    torch.manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({**nn.Linear(4, 3).state_dict(), **tensors}, path)
    return path


def done(fl: Fl, *arguments: object) -> dict[str, Any]:
    """The facts of a command that ends well."""
    result = fl("landscape", *arguments, "--json")
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_the_values_are_those_of_the_moved_model(fl: Fl, run: Path, tmp_path: Path) -> None:
    """At a = -2, 0, 2: the loss and accuracy of w + a d over the 120 examples; the middle is the model itself."""
    path = a_model(tmp_path / "m.safetensors")
    facts = done(fl, path, run, "--points", "3", "--radius", "2", "--examples", "1000", "--out", tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/landscape.csv").read_text().splitlines()))
    assert [(row["model"], float(row["a"])) for row in rows] == [("m", -2.0), ("m", 0.0), ("m", 2.0)]
    task = load_task("points:Points", {})
    examples = task.train_data(Shard())
    assert isinstance(examples, Examples)
    for row in rows:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        direction = filter_normalised(model, 0)
        with torch.no_grad():
            model.weight.add_(direction["weight"], alpha=float(row["a"]))
            output = model(examples.inputs)
        assert float(row["loss"]) == pytest.approx(float(functional.cross_entropy(output, examples.targets)), rel=1e-5)
        assert float(row["accuracy"]) == pytest.approx(float((output.argmax(1) == examples.targets).float().mean()))
    assert facts["models"][0]["loss"] == pytest.approx(float(rows[1]["loss"]))
    torch.manual_seed(0)
    loss = MeanLoss(nn.Linear(4, 3), task.loss, [(examples.inputs, examples.targets)])
    assert facts["models"][0]["hessian_largest"] == pytest.approx(largest_eigenvalue(loss).value, rel=1e-4)
    assert facts["models"][0]["hessian_trace"] == pytest.approx(trace(loss, seed=1).value, rel=1e-4)
    assert (tmp_path / "out/landscape.png").read_bytes().startswith(b"\x89PNG")


def test_several_models_share_a_grid_of_two_directions(fl: Fl, run: Path, tmp_path: Path) -> None:
    """Nine places of each; the same call gives the same files, and does not overwrite them unasked."""
    paths = [a_model(tmp_path / f"{seed}/model.safetensors", seed) for seed in (1, 2)]
    arguments = (*paths, run, *SMALL, "--two", "--out", tmp_path / "out")
    done(fl, *arguments)
    file = tmp_path / "out/landscape.csv"
    text = file.read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["model"] for row in rows] == ["1/model"] * 9 + ["2/model"] * 9
    assert [(row["a"], row["b"]) for row in rows[:3]] == [("-1.0", "-1.0"), ("-1.0", "0.0"), ("-1.0", "1.0")]
    again = fl("landscape", *arguments)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    done(fl, *arguments, "--force")
    assert file.read_text() == text


def test_a_run_is_read_from_its_folder(fl: Fl, run: Path, tmp_path: Path) -> None:
    """The folder of a seed, the one above it, and the save of a run that has not ended give the same model."""
    out = tmp_path / "out"
    assert fl("simulate", run, "--out", out, "--workers", 1).exit_code == 0
    values = [done(fl, path, run, *SMALL)["models"][0]["loss"] for path in (out / "seed-0/model.safetensors", out)]
    (out / "seed-0/model.safetensors").unlink()
    values.append(done(fl, out / "seed-0", run, *SMALL)["models"][0]["loss"])
    assert values == [values[0]] * 3


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda folder: folder / "none", 5, "there is no"),
        (lambda folder: _file(folder / "text.safetensors", b"text"), 2, "expected a model as safetensors, got another"),
        (lambda folder: _folder(folder / "empty"), 5, "has no model: expected model.safetensors"),
        (lambda folder: _folder(folder / "two", "seed-0", "seed-1"), 2, "runs of 2 seeds (seed-0, seed-1)"),
        (
            lambda folder: a_model(folder / "m.safetensors", weight=torch.zeros(5, 4)),
            2,
            "expected the tensor 'weight' as float32 [3, 4], got float32 [5, 4]",
        ),
        (lambda folder: a_model(folder / "m.safetensors", more=torch.zeros(2)), 2, "got the tensor 'more' float32 [2]"),
        (lambda folder: a_model(folder / "m.safetensors", bias=torch.full((3,), torch.nan)), 2, "the run has diverged"),
    ],
)
def test_what_is_no_model_of_the_task_is_named(
    fl: Fl, run: Path, tmp_path: Path, make: Any, code: int, message: str
) -> None:
    """The error says what was expected and what came, and no file is written."""
    result = fl("landscape", make(tmp_path), run, *SMALL, "--out", tmp_path / "out")
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_named(fl: Fl, run: Path, tmp_path: Path) -> None:
    """An even number of points, a file that is no run, and a task that does not exist."""
    path = a_model(tmp_path / "m.safetensors")
    assert "expected an odd number" in fl("landscape", path, run, "--points", "4").stderr
    assert "there is no file" in fl("landscape", path, tmp_path / "none.toml").stderr
    run.write_text(RUN.replace("points:Points", "points:Nothing"))
    result = fl("landscape", path, run)
    assert (result.exit_code, "Nothing" in result.stderr) == (2, True)


def test_an_interruption_leaves_no_file(fl: Fl, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the second point."""
    points: list[object] = []

    def interrupted(sample: Sample, *given: Any) -> Any:
        points.append(given)
        if len(points) > 1:
            raise KeyboardInterrupt
        return point(sample, *given)

    point = Sample._point
    monkeypatch.setattr(Sample, "_point", interrupted)
    result = fl("landscape", a_model(tmp_path / "m.safetensors"), run, *SMALL, "--out", tmp_path / "out")
    assert (result.exit_code, len(points)) == (130, 2)
    assert not (tmp_path / "out").exists()


def test_labels_are_the_parts_in_which_paths_differ() -> None:
    """The file's name, with folders where names are equal; equal paths are numbered."""
    assert labels_of([Path("a/x.safetensors"), Path("a/y")]) == ["x", "y"]
    assert labels_of([Path("a/seed-0"), Path("b/seed-0")]) == ["a/seed-0", "b/seed-0"]
    assert labels_of([Path("a/x"), Path("a/x")]) == ["a/x (1)", "a/x (2)"]


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _folder(path: Path, *inner: str) -> Path:
    path.mkdir()
    for name in inner:
        (path / name).mkdir()
    return path


def test_levels_of_a_picture_are_told_apart() -> None:
    """Three digits where they are enough, more where two levels would read the same."""
    assert distinct([0.5, 1.25, 3.125]) == ["0.5", "1.25", "3.12"]
    assert distinct([2.3031, 2.3044, 2.31]) == ["2.303", "2.304", "2.31"]
