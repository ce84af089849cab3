"""Versions and machine of this process, which results depend on, and optional packages."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from fl_common.extras import install_hint
from fl_ops.errors import UsageError

_PACKAGES = ("impetus-fl", "torch", "numpy", "grpcio", "scikit-learn")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in _PACKAGES}}


def machine() -> dict[str, Any]:
    """System and number of processors, without the machine's name."""
    return {"system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}


def package_version(package: str) -> str:
    """The installed version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_plotting(command: str) -> None:
    """Raises UsageError if matplotlib is not installed, before hours of work that end in a plot."""
    if find_spec("matplotlib") is None:
        raise UsageError(f"{command} draws with matplotlib, which is not installed: {install_hint('demo')}")
