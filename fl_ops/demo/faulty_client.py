"""A daemon whose task is spoilt, for the demo's third part: it runs fl_client with the fault that its client id names.

"exaggerating" sends an update that is far too large. "failing" raises an error while it trains.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from fl_ops.demo.settings import EXAGGERATING
from fl_tasks import Classifier

_FACTOR = 1e4


def spoil(name: str) -> None:
    """Give the loss of this process's tasks the fault of this name."""
    right = Classifier.loss

    def exaggerated(self: Classifier, *given: Any) -> Any:
        return _FACTOR * right(self, *given)

    def failed(*_: Any) -> Any:
        raise OSError("the camera of this device does not answer")

    Classifier.loss = exaggerated if name == EXAGGERATING else failed  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    spoil(Path(sys.argv[-1]).stem)
    runpy.run_module("fl_client", run_name="__main__", alter_sys=True)
