"""The task of the soak: the integration tests' own, with a pause in each step so that rounds leave the machine air."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from tests.integration.tiny_task import Tiny


class Paced(Tiny):
    """pause_s: how long a training step waits. Other options as Tiny has them."""

    def __init__(self, pause_s: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._pause_s = pause_s

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        time.sleep(self._pause_s)
        return super().loss(output, target)
