"""The task of the federations in the pictures: the digits of the demo, on slow or faulty devices."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_tasks.built_in.digits import Digits

EXAGGERATION = 40.0
"""The factor of a sick device's loss: its updates are finite and far too long."""


class PacedDigits(Digits):
    """Digits with faults.

    pause_s: added to each training step. fails: a step's chance to fail. sick, unplugged: files that cause a fault.
    """

    def __init__(
        self, pause_s: float = 0.0, fails: float = 0.0, sick: str = "", unplugged: str = "", **options: Any
    ) -> None:
        super().__init__(**options)
        self._pause_s, self._fails = pause_s, fails
        self._sick, self._unplugged = Path(sick or "/nonexistent"), Path(unplugged or "/nonexistent")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the digits' own loss after the pause."""
        time.sleep(self._pause_s)
        if self._unplugged.exists() or random.random() < self._fails:  # noqa: S311 - not for secrets
            raise RuntimeError("the camera is unplugged")
        loss = super().loss(output, target)
        return loss * EXAGGERATION if self._sick.exists() else loss
