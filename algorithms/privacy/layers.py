"""Gradients of single examples by the weights of linear layers and convolutions, from what comes in and goes out.

A zero is added to each layer's output. The gradient by it, b, and the layer's input a give the gradient by the weight:
the sum of b a^T over the positions of the output. So a pass differentiates by no weight, which is faster: torch's own
rule computes the weights of a convolution for single examples with a group for each. A linear layer that is used at one
position has the gradient b a^T, which is never made: its norm is ||a|| ||b||.

Layers are found by watching one example pass through the model. Only those are taken whose weight and bias are used
once, in this way, so that no other part of their gradient is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from algorithms.base import Tensors
from algorithms.batches import leaves

Sizes = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of torch's functions for layers, by their names there."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Sizes = 1
    padding: Sizes | str = 0
    dilation: Sizes = 1
    groups: int = 1


_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_FUNCTIONS = (functional.linear, *_CONVOLUTIONS)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer or a convolution, as one example uses it."""

    weight: str
    bias: str
    """Empty: it has none that is trained."""
    convolution: bool
    zero: Tensor
    """A zero with the shape of the output for one example; it takes no memory."""
    floats: int
    """Numbers in memory for each example: its input and output, and the gradient and what it is made of."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    size: tuple[int, ...]
    """The kernel's. This and the three before are empty for a linear layer."""

    def gradient(self, inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """(a [examples, in, positions], b [examples, out, positions]) of what `Watched` recorded.

        inputs: [examples, ...]. outputs: the gradients by what was added to the outputs, of their shape.
        """
        if self.convolution:
            return self._patches(inputs.flatten(0, 1)), outputs.flatten(0, 1).flatten(2)
        a, b = (tensor.reshape(len(tensor), -1, tensor.shape[-1]) for tensor in (inputs, outputs))
        return a.transpose(1, 2), b.transpose(1, 2)

    def _patches(self, inputs: Tensor) -> Tensor:
        """The parts of images [examples, channels, ...] below each position of the kernel.

        Views that are copied once take half the time of torch.nn.functional.unfold.
        """
        edges = [edge for edge in reversed(self.padding) for _ in range(2)]
        views = functional.pad(inputs, edges) if any(edges) else inputs
        for axis, (size, step, gap) in enumerate(zip(self.size, self.stride, self.dilation, strict=True), 2):
            views = views.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
        axes = len(self.size)
        positions, kernel = range(2, 2 + axes), range(2 + axes, 2 + 2 * axes)
        return views.permute(0, 1, *kernel, *positions).flatten(1, 1 + axes).flatten(2)


class Watched(TorchFunctionMode):
    """While it is active, zeros are added to the outputs of layers, and their inputs are recorded."""

    def __init__(self, layers: Mapping[str, Layer], parameters: Tensors, zeros: Tensors) -> None:
        """layers: by their weights' names. parameters: those that the model uses. zeros: by the names of layers."""
        super().__init__()
        self._layers, self._zeros = layers, zeros
        self._names = _names(parameters, (name for one in layers.values() for name in (one.weight, one.bias) if name))
        self.inputs: Tensors = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode. Raises RuntimeError for another use of a layer's weight or bias."""
        output = func(*args, **(kwargs or {}))
        used = _used(self._names, args, kwargs)
        if not used:
            return output
        layer = self._layers.get(used[0]) if func in _FUNCTIONS else None
        wanted = () if layer is None else (layer.weight, layer.bias) if layer.bias else (layer.weight,)
        if layer is None or tuple(used) != wanted or layer.weight in self.inputs or output.shape != layer.zero.shape:
            raise RuntimeError(f"the model uses {used[0]} in another way than for the example before")
        self.inputs[layer.weight] = args[0].detach()
        return output + self._zeros[layer.weight]


def found_layers(parameters: Tensors, forward: Callable[[], object]) -> dict[str, Layer]:
    """The layers that a pass of one example uses, by their weights' names. parameters: of the model, trained."""
    search = _Search(parameters)
    with search:
        forward()
    once = {name for name, count in search.uses.items() if count == 1}
    return {name: layer for name, layer in search.layers.items() if {name, layer.bias} <= once | {""}}


class _Search(TorchFunctionMode):
    """Counts the uses of parameters, and notes which are those of layers."""

    def __init__(self, parameters: Tensors) -> None:
        super().__init__()
        self._names = _names(parameters, parameters)
        self.uses: Counter[str] = Counter()
        self.layers: dict[str, Layer] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        output = func(*args, **(kwargs or {}))
        used = _used(self._names, args, kwargs)
        self.uses.update(used)
        if used and func in _FUNCTIONS:
            layer = _layer(func in _CONVOLUTIONS, _Call(*args, **(kwargs or {})), self._names, output)
            if layer is not None:
                self.layers[layer.weight] = layer
        return output


def _layer(convolution: bool, call: _Call, names: Mapping[int, str], output: Tensor) -> Layer | None:
    """The layer of a call; None for one whose gradient is left to torch."""
    weight, bias = names.get(id(call.weight), ""), names.get(id(call.bias), "")
    if not weight or output.dim() < 2 or id(call.input) in names:
        return None
    zero, both = output.new_zeros(()).expand(output.shape), call.input.numel() + output.numel()
    if not convolution:
        one = output.numel() == output.shape[-1]
        return Layer(weight, bias, False, zero, both + (0 if one else call.weight.numel()), (), (), (), ())
    if call.groups != 1 or isinstance(call.padding, str) or output.dim() != call.weight.dim() or len(output) != 1:
        return None
    size = tuple(call.weight.shape[2:])
    stride, padding, dilation = (_each(sizes, len(size)) for sizes in (call.stride, call.padding, call.dilation))
    patches = call.weight[0].numel() * math.prod(output.shape[2:])
    return Layer(weight, bias, True, zero, both + patches + call.weight.numel(), stride, padding, dilation, size)


def _each(sizes: Sizes, axes: int) -> tuple[int, ...]:
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * axes if len(given) == 1 else given


def _names(parameters: Tensors, wanted: Iterable[str]) -> dict[int, str]:
    return {id(parameters[name]): name for name in wanted}


def _used(names: Mapping[int, str], args: Any, kwargs: Any) -> list[str]:
    """The names of the parameters among the arguments of a call, in order, as often as they are there."""
    return [names[id(leaf)] for leaf in _arguments(args, kwargs) if id(leaf) in names]


def _arguments(args: Any, kwargs: Any) -> Iterator[Any]:
    for argument in (*args, *(kwargs or {}).values()):
        if isinstance(argument, tuple | list | dict):
            yield from leaves(argument)
        else:
            yield argument
