"""Models as ONNX graphs: they compute what torch does for other numbers of examples, or are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_ops.errors import Refused, UsageError
from fl_ops.exports import onnx_graph
from fl_ops.exports.onnx_graph import write_onnx
from fl_tasks import Classifier, Examples, Shard
from fl_tasks.models.transformer import CausalTransformer

FEATURES, TOKENS, LENGTH = 4, 17, 8


def table() -> nn.Module:
    """Two layers for rows of a table."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    """A convolution with statistics."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def transformer() -> nn.Module:
    """A small causal transformer."""
    return CausalTransformer(TOKENS, LENGTH, width=16, layers=2, heads=2)


class Row(nn.Module):
    """A layer, and what a test does with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)


class Branches(Row):
    """Its path depends on the values."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output if output.sum() > 0 else -output


class Fixed(Row):
    """It takes three examples only."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs.view(3, FEATURES))
        return output


class Noisy(Row):
    """Two calls have different outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output + torch.rand(FEATURES)


class Own(Classifier):
    """A model with held-out examples."""

    def __init__(self, made: object, inputs: Tensor) -> None:
        self._made, self._inputs = made, inputs

    def model(self) -> nn.Module:
        """The model of the test."""
        assert callable(self._made)
        module: nn.Module = self._made()
        return module

    def train_data(self, shard: Shard) -> Examples:
        """The same as the held-out examples."""
        return self.eval_data(shard)

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The inputs of the test."""
        return Examples(self._inputs, torch.zeros(len(self._inputs), dtype=torch.long))


def rows(count: int = 5) -> Tensor:
    """Rows of a table."""
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))


def written(task: Own, folder: Path) -> tuple[nn.Module, Path]:
    """The task's model, and the file of its graph."""
    module = task.model()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.3)
    save_file(module.state_dict(), folder / "model.safetensors")
    write_onnx(folder / "model.safetensors", folder / "model.onnx", task)
    return module.eval(), folder / "model.onnx"


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        pytest.param(table, rows(), id="table"),
        pytest.param(convolutional, torch.ones(5, 1, 8, 8) / 3, id="cnn", marks=pytest.mark.slow),
        pytest.param(
            transformer, torch.arange(5 * LENGTH).reshape(5, LENGTH) % TOKENS, id="transformer", marks=pytest.mark.slow
        ),
    ],
)
def test_the_graph_computes_what_the_model_does(made: object, inputs: Tensor, tmp_path: Path) -> None:
    """Also for a number of examples that no trace and no check had; the file has no path of this machine."""
    module, file = written(Own(made, inputs), tmp_path)
    graph = onnx.load(file)
    (computed,) = ReferenceEvaluator(graph).run(None, {graph.graph.input[0].name: inputs.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(computed), module(inputs), atol=1e-4, rtol=1e-4)
    content = file.read_bytes()
    assert b".py" not in content
    assert str(Path(torch.__file__).parent).encode() not in content


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Branches, r"torch cannot export the model to ONNX: .*test_onnx_graph.py, line \d+, in forward"),
        (Fixed, "torch cannot export the model to ONNX: .*\n.*specialized it to be a constant"),
        pytest.param(Noisy, "computes something else than the model", marks=pytest.mark.slow),
    ],
)
def test_a_model_without_a_right_graph_is_refused(made: type[Row], why: str, tmp_path: Path) -> None:
    """The error names the reason and the other format, and no file is written."""
    with pytest.raises(Refused, match=why) as refused:
        written(Own(made, rows()), tmp_path)
    assert "use --format whole" in str(refused.value)
    assert not (tmp_path / "model.onnx").exists()


class Described(Own):
    """A task that gives the arguments of its model."""

    def example_inputs(self) -> Tensor:
        """Rows that are no held-out examples."""
        return rows(2)


def test_examples_are_held_out_ones_or_those_of_the_task(tmp_path: Path) -> None:
    """Without two examples the error names `example_inputs()`, with which the same task works."""
    with pytest.raises(UsageError, match=r"method example_inputs\(\)"):
        written(Own(table, rows(0)), tmp_path)
    _, file = written(Described(table, rows(0)), tmp_path)
    onnx.checker.check_model(onnx.load(file))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command that installs it."""
    monkeypatch.setattr(onnx_graph, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs onnx and onnxscript, not installed here: pip install"):
        write_onnx(tmp_path / "model.safetensors", tmp_path / "model.onnx", Own(table, rows()))
