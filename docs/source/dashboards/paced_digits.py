"""The task of the federation in the pictures: the digits of the demo, on devices that are slow, sick or unplugged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from tasks.digits import Digits

EXAGGERATION = 40.0
"""By how much the loss of a sick device is too large: its updates are finite, and far too long."""


class PacedDigits(Digits):
    """pause_s: what a training step takes besides. sick, unplugged: files; while one is there, its fault is."""

    def __init__(self, pause_s: float = 0.0, sick: str = "", unplugged: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._pause_s = pause_s
        self._sick, self._unplugged = Path(sick or "/nonexistent"), Path(unplugged or "/nonexistent")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """As the digits' own, some time later."""
        time.sleep(self._pause_s)
        if self._unplugged.exists():
            raise RuntimeError("the camera is unplugged")
        loss = super().loss(output, target)
        return loss * EXAGGERATION if self._sick.exists() else loss
