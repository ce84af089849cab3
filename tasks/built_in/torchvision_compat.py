"""Imports torchvision, also with a build of torch that does not match its compiled operators.

With such a build (a vendor's or a newer torch) `import torchvision` fails with "operator torchvision::nms does not
exist", because it registers implementations for undeclared operators. Data sets and models do not use these operators,
so this module declares their schemas and imports again. Calling such an operator still fails.

Import torchvision only through this module and inside the function that needs it: it costs a second and 85 MB.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from tasks.base import TaskError

SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def import_torchvision() -> ModuleType:
    """The torchvision module. Raises TaskError if it is not installed."""
    try:
        return _import()
    except ModuleNotFoundError as error:
        raise TaskError("this task needs torchvision: pip install torchvision") from error
    except RuntimeError as error:
        # Not declared in advance: where torchvision's binary part loads, it must declare them itself.
        if "operator torchvision::" not in str(error):
            raise
    declare_missing_operators()
    return _import()


def declare_missing_operators() -> list[str]:
    """Declare the operators of SCHEMAS that torch does not know. Returns their names."""
    missing = [name for name in SCHEMAS if not _is_declared(name)]
    for name in missing:
        torch.library.define(name, SCHEMAS[name])
    return missing


def _is_declared(name: str) -> bool:
    namespace, operator = name.split("::")
    return hasattr(getattr(torch.ops, namespace), operator)


def _import() -> ModuleType:
    # A failed import leaves submodules without a package in sys.modules.
    if "torchvision" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
    return importlib.import_module("torchvision")
