"""torchvision, also beside a build of torch that its compiled operators do not fit.

A vendor's or a newer torch cannot load torchvision's binary part; then `import torchvision` ends with "operator
torchvision::nms does not exist", because it describes operators that nobody declared. Data sets and models need none of
them, so their schemas are declared here and the import goes on. Calling such an operator still fails.

Import torchvision through this module only, inside the function that needs it: it costs a second and 85 MB.
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
    """The torchvision module. Raises TaskError when it is not installed."""
    try:
        return _import()
    except ModuleNotFoundError as error:
        raise TaskError("this task needs torchvision: pip install torchvision") from error
    except RuntimeError as error:
        # Not declared beforehand: where torchvision's own binary part loads, it must be the first to declare them.
        if "operator torchvision::" not in str(error):
            raise
    declare_missing_operators()
    return _import()


def declare_missing_operators() -> list[str]:
    """Declare the operators of SCHEMAS that torch does not know; gives the names of those."""
    missing = [name for name in SCHEMAS if not _is_declared(name)]
    for name in missing:
        torch.library.define(name, SCHEMAS[name])
    return missing


def _is_declared(name: str) -> bool:
    namespace, operator = name.split("::")
    return hasattr(getattr(torch.ops, namespace), operator)


def _import() -> ModuleType:
    # A failed import leaves submodules behind that belong to no package.
    if "torchvision" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
    return importlib.import_module("torchvision")
