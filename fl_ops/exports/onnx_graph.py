"""The graph of an exported model in ONNX, which is compared with the model in torch before anybody gets it.

torch traces the model on a few examples: the arguments that the task's `example_inputs()` returns, or those that the
model gets for the first held-out examples here. The number of examples stays open, every other size is that of the
examples. The graph has no line of the model's code and no path of this machine.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from algorithms.model_state import evaluation_mode
from algorithms.outside_code import described, place_of
from fl_common.extras import install_hint
from fl_common.units import counted
from fl_ops.errors import Refused, UsageError
from fl_ops.exports.formats import load_exported
from fl_tasks import Task, TaskError
from fl_tasks.batches import ordered_batches
from fl_tasks.data.forms import as_data, forward_of
from fl_tasks.errors import task_call

GRAPH = "model.onnx"
"""The file of a release."""
MOST_BYTES = (1 << 31) - 1
"""Longest file: a protobuf message has at most 2 GiB."""
_EXAMPLES = 3
"""The examples of a trace: torch takes a size of 1 for a constant."""
_PARAGRAPH = "\n\n"
_INSTEAD = "change the model, or use --format whole, which devices load with the task's own code"


def write_onnx(exported: Path, to: Path, task: Task) -> None:
    """Write the graph of the exported model with all values.

    Raises UsageError: the library is missing, or there are no examples. Refused: torch cannot export the model, or the
    graph computes something else.
    """
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise UsageError(f"--format onnx needs {' and '.join(missing)}, not installed here: {install_hint('onnx')}")
    module = load_exported(task, exported)
    with evaluation_mode(module), torch.no_grad():
        call = _example_call(task, module)
        data = _exported(module, call)
        _compare(module, call, data)
        _compare(module, call.of_one_example(), data)
    to.write_bytes(data)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of the model for some examples."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    examples: int

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in torch's order."""
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def has_examples(self, tensor: object) -> bool:
        """Whether the first axis of an argument counts the examples."""
        return isinstance(tensor, Tensor) and tensor.ndim > 0 and len(tensor) == self.examples

    def of_one_example(self) -> _Call:
        """The same of the first example alone."""
        whole = (self.args, dict(self.kwargs))
        args, kwargs = pytree.tree_map(lambda leaf: leaf[:1] if self.has_examples(leaf) else leaf, whole)
        return _Call(args, kwargs, 1)


def _example_call(task: Task, module: nn.Module) -> _Call:
    """The arguments of the model for the task's examples. Raises UsageError if there are too few, Refused."""
    own = getattr(task, "example_inputs", None)
    try:
        if callable(own):
            with task_call("the task's example_inputs()"):
                given = own()
            args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
            args = args if isinstance(args, tuple | list) else (args,)
        else:
            args, kwargs = _held_out_call(task, module)
    except TaskError as error:
        raise Refused(str(error)) from error
    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors or len(tensors[0]) < 2:
        raise UsageError(
            "--format onnx: expected a tensor with two examples or more among the arguments of the model, got"
            f" {[list(tensor.shape) for tensor in tensors]}: give the task a method example_inputs(), which returns the"
            " arguments of the model for a few examples as a tensor, a tuple or a dict"
        )
    return _Call(tuple(args), kwargs, len(tensors[0]))


def _held_out_call(task: Task, module: nn.Module) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments that the model gets for the first held-out examples here; none without examples."""
    calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    with task_call("the task's eval_data() or model"):
        data = as_data(task.eval_data())
        hook = module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            if len(data):
                forward_of(task)(module, next(iter(ordered_batches(data, _EXAMPLES))))
        finally:
            hook.remove()
    return calls[0] if calls else ((), {})


def _exported(module: nn.Module, call: _Call) -> bytes:
    """The graph with all values. Raises Refused if torch cannot make it."""
    shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
    for tensor in call.tensors():
        if call.has_examples(tensor):
            shapes[tensor] = {0: batch}
    try:
        with _silent():
            sizes = shapes.dynamic_shapes(module, call.args, dict(call.kwargs))
            traced = torch.export.export(module, call.args, dict(call.kwargs), dynamic_shapes=sizes, strict=False)
            program = torch.onnx.export(traced, dynamo=True, verbose=False, external_data=False)
    except Exception as raised:  # noqa: BLE001 - torch runs the model's own code
        error: BaseException = raised
        while error.__cause__ is not None and isinstance(error, torch.onnx.OnnxExporterError):
            error = error.__cause__  # which says what is missing
        why = f"{type(error).__name__}: {str(error).strip().split(_PARAGRAPH)[0]}"
        place = f" ({found})" if (found := place_of(error)) else ""
        raise Refused(f"torch cannot export the model to ONNX: {why}{place}\n{_INSTEAD}") from error
    if program is None or not isinstance(program, torch.onnx.ONNXProgram):
        raise Refused(f"torch made no ONNX graph of the model: {_INSTEAD}")
    model = program.model_proto
    if (size := model.ByteSize()) > MOST_BYTES:
        raise Refused(f"expected an ONNX file of at most {MOST_BYTES} bytes, got {size}: use --format whole")
    _without_traces(model)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _without_traces(model: Any) -> None:
    """Remove where each part comes from: torch notes lines of code, and paths of this machine."""
    graph = model.graph
    for part in (
        model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *model.functions,
        *(node for function in model.functions for node in function.node),
    ):  # fmt: skip
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _compare(module: nn.Module, call: _Call, data: bytes) -> None:
    """Compute the outputs by the graph and by the model. Raises Refused unless they agree."""
    from onnx import load_model_from_string
    from onnx.reference import ReferenceEvaluator

    outputs = [leaf for leaf in pytree.tree_leaves(module(*call.args, **call.kwargs)) if isinstance(leaf, Tensor)]
    model, given = load_model_from_string(data), [tensor.numpy() for tensor in call.tensors()]
    try:
        names = [value.name for value in model.graph.input]
        computed = ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True)))
        pairs = [(output, torch.as_tensor(got)) for output, got in zip(outputs, computed, strict=True)]
    except Exception as error:
        raise Refused(f"the ONNX graph cannot be checked: {described(error)}\n{_INSTEAD}") from error
    for number, (expected, got) in enumerate(pairs):
        if expected.shape != got.shape or (difference := _difference(expected, got)) > 1:
            shown = (
                f"shape {list(got.shape)}" if expected.shape != got.shape else f"{difference:.3g} times the tolerance"
            )
            raise Refused(
                "the ONNX graph computes something else than the model for "
                f"{counted(call.examples, 'example')}: output {number},"
                f" shape {list(expected.shape)}, got {shown}\n{_INSTEAD}"
            )


def _difference(expected: Tensor, got: Tensor) -> float:
    """Largest difference in units of the tolerance: the root of the precision, times the largest value."""
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, got.to(expected.dtype)) else float("inf")
    wanted, found = expected.double(), got.double()
    tolerance = math.sqrt(torch.finfo(expected.dtype).eps) * max(1.0, float(wanted.abs().nan_to_num(0, 0, 0).max()))
    differences = torch.where(wanted.isnan() & found.isnan() | (wanted == found), 0.0, (wanted - found).abs())
    return float(differences.nan_to_num(float("inf")).max()) / tolerance


@contextmanager
def _silent() -> Iterator[None]:
    """Without what torch prints and logs of a trace: its error says it, and the output is the command's."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
