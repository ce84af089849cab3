"""The training device, chosen at the start, and the precision and memory format of its computations."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_client.errors import DeviceError
from fl_client.settings.config import MemoryFormat, Precision
from protos.fl.v1 import coordinator_pb2


def choose(name: str) -> torch.device:
    """The device for "auto" (the first CUDA device, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises:
        DeviceError: the CUDA device does not exist.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise DeviceError(
                f'device: expected a CUDA device for "{name}", found {count or "none"}'
                f" ({'torch is built without CUDA' if torch.version.cuda is None else 'see nvidia-smi'}):"
                ' set device = "cpu" or "auto"'
            )
        device = torch.device("cuda", device.index or 0)
    return device


def of_rank(device: torch.device, rank: int) -> torch.device:
    """The device of another rank: the CUDA device of its number, or the CPU."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def count_ranks(processes: int | str, device: torch.device) -> int:
    """How many processes train together. Raises DeviceError if there are not as many CUDA devices."""
    if device.type != "cuda":
        return 1 if processes == "auto" else int(processes)
    devices = torch.cuda.device_count()
    ranks = devices if processes == "auto" else int(processes)
    if ranks > 1 and device.index:
        raise DeviceError(f'device: expected "cuda" or "auto" with processes = {processes}, got "cuda:{device.index}"')
    if ranks > devices:
        raise DeviceError(f"processes: expected at most {devices}, the CUDA devices of this machine, got {ranks}")
    return ranks


def describe(device: torch.device) -> coordinator_pb2.Device:
    """The device as a registration describes it: kind, product name, memory in bytes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return coordinator_pb2.Device(kind="cuda", name=properties.name, memory_bytes=properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return coordinator_pb2.Device(kind="cpu", name=platform.processor() or platform.machine(), memory_bytes=memory)


@dataclass(frozen=True, slots=True)
class Compute:
    """Precision and memory format of the forward and backward pass. Parameters and updates stay float32."""

    precision: Precision = "float32"
    """bfloat16: by torch.autocast, with parameters, gradients and loss in float32. The loss is not scaled, because
    bfloat16 has the exponents of float32. float16: the same, and the trainer scales the loss."""
    memory_format: MemoryFormat = "auto"
    """Order of axes of images and convolutions. auto: channels_last on CUDA, contiguous elsewhere."""

    def prepared(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The same model, moved to the device and changed to compute this way.

        An output of one tensor is float32. Except with the defaults, a deep copy of the model still calls the original.
        """
        model = model.to(device)
        if self.memory_format == "channels_last" or (self.memory_format == "auto" and device.type == "cuda"):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's types lack it
            model.register_forward_pre_hook(_channels_last_inputs)
        if self.precision != "float32":
            _lower_precision(model, device, torch.float16 if self.precision == "float16" else torch.bfloat16)
        return model


DEFAULT_COMPUTE = Compute()


def _channels_last_inputs(model: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    """Images of a batch, [n, channels, height, width], in the memory format of the convolutions."""
    del model
    return tuple(
        part.contiguous(memory_format=torch.channels_last) if isinstance(part, Tensor) and part.dim() == 4 else part
        for part in inputs
    )


def _lower_precision(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    # Only the forward pass: the backward pass takes its types from it, and the loss needs float32.
    forward = model.forward

    def lowered(*inputs: object, **named: object) -> object:
        with torch.autocast(device.type, dtype):
            output = forward(*inputs, **named)
        return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output

    model.forward = lowered
