"""The task of the soak: `Tiny` with a pause in each step, so that rounds leave the machine idle time."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from tests.processes.tiny_task import Tiny


class Paced(Tiny):
    """pause_s: the pause in each training step, in seconds. Other options: see Tiny."""

    def __init__(self, pause_s: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._pause_s = pause_s

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        time.sleep(self._pause_s)
        return super().loss(output, target)
