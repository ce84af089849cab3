"""Makes torchvision importable with a build of torch that does not match its compiled operators.

With such a build (a vendor's or a newer torch) `import torchvision` fails with "operator torchvision::nms does not
exist", because it registers implementations for undeclared operators. Data sets and models do not use these operators.
So `fl_tasks.data.reading`, which the package imports, declares their schemas before a task, or a library such as peft
or transformers, imports torchvision. Calling such an operator still fails. torchvision itself is not imported, which
would cost a second and 85 MB.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from fl_tasks.errors import TaskError

SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def import_torchvision() -> ModuleType:
    """The torchvision module. Raises TaskError if it is not installed."""
    declare_missing_operators()
    try:
        import torchvision  # noqa: PLC0415 - only tasks that read images through it pay for it
    except ModuleNotFoundError as error:
        raise TaskError("this task needs torchvision: pip install torchvision") from error
    module: ModuleType = torchvision
    return module


def declare_missing_operators() -> list[str]:
    """Declare the operators of SCHEMAS that torchvision's binary part does not declare. Returns their names.

    Where the binary part loads, it must be the first to declare them, so it is loaded here.
    """
    if all(map(_is_declared, SCHEMAS)) or "torchvision" in sys.modules or (spec := find_spec("torchvision")) is None:
        return []
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]  # of an import that failed before
    for folder in spec.submodule_search_locations or ():
        for binary in sorted(Path(folder).glob("_C*")):  # _C.so, and _C_stable.so since torchvision 0.29
            if binary.name.endswith(tuple(EXTENSION_SUFFIXES)):
                with suppress(OSError):  # it is made for another build of torch
                    torch.ops.load_library(str(binary))
    missing = [name for name in SCHEMAS if not _is_declared(name)]
    for name in missing:
        torch.library.define(name, SCHEMAS[name])
    return missing


def _is_declared(name: str) -> bool:
    namespace, operator = name.split("::")
    return hasattr(getattr(torch.ops, namespace), operator)
