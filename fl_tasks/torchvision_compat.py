"""Makes torchvision importable with a build of torch that does not match its compiled operators.

With such a build (a vendor's or a newer torch) `import torchvision` fails with "operator torchvision::nms does not
exist", because it registers implementations for undeclared operators. Data sets and models do not use these operators.
So `install_import_hook` lets a failed import declare their schemas and start again. Calling such an operator still
fails. The hook imports nothing itself: it acts when a task, or a library such as peft or transformers, imports
torchvision, which costs a second and 85 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

import torch

from fl_tasks.base import TaskError

SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def import_torchvision() -> ModuleType:
    """The torchvision module. Raises TaskError if it is not installed."""
    install_import_hook()
    try:
        import torchvision  # noqa: PLC0415 - only tasks that read images through it pay for it
    except ModuleNotFoundError as error:
        raise TaskError("this task needs torchvision: pip install torchvision") from error
    module: ModuleType = torchvision
    return module


def install_import_hook() -> None:
    """Let later imports of torchvision in this process declare missing operators. A repeat changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def declare_missing_operators() -> list[str]:
    """Declare the operators of SCHEMAS that torch does not know. Returns their names."""
    missing = [name for name in SCHEMAS if not _is_declared(name)]
    for name in missing:
        torch.library.define(name, SCHEMAS[name])
    return missing


class _Finder(MetaPathFinder):
    """Finds the package torchvision where the other finders do, and gives it the loader below."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Executes the package; after a failure for undeclared operators, declares them and executes it once more."""

    def exec_module(self, module: ModuleType) -> None:
        fresh = dict(vars(module))
        try:
            super().exec_module(module)
        except RuntimeError as error:
            # Not declared in advance: where torchvision's binary part loads, it must declare them itself.
            if "operator torchvision::" not in str(error) or not declare_missing_operators():
                raise
            _forget_failed_import(module, fresh)
            super().exec_module(module)


def _forget_failed_import(module: ModuleType, fresh: dict[str, object]) -> None:
    vars(module).clear()
    vars(module).update(fresh)
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]


def _is_declared(name: str) -> bool:
    namespace, operator = name.split("::")
    return hasattr(getattr(torch.ops, namespace), operator)
