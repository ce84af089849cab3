"""The operator's command `fl`: runs, clients, models, certificates, simulation and comparison; and a reading API.

For a notebook: `import fl_ops as impetus`, then `impetus.connect(...)`; docs/operation/notebook.md has the rest. The
names below are loaded when they are first used, so that the import costs nothing.

It may import every other package; no other package imports it. Inside, imports go from `commands` down to `demo` and
`compare`, then `simulate`, then `render`, `admin` and `certificates`, then `files`, `environment` and `errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_ops.notebook import Coordinator, Run, connect

__all__ = ["Coordinator", "Run", "connect"]


def __getattr__(name: str) -> Any:
    """The names of `__all__`, from `fl_ops.notebook`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fl_ops import notebook

    return getattr(notebook, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
