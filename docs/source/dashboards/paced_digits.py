"""The task of the federations in the pictures: the digits of the demo, on slow or faulty devices."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_tasks.built_in.digits import Digits


class PacedDigits(Digits):
    """Digits with faults.

    pause_s: added to each training step. fails: a step's chance to fail. sick, unplugged: files that cause a fault.
    exaggeration: the factor of a sick device's loss, whose updates are far too long.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the options of a task
        self,
        pause_s: float = 0.0,
        fails: float = 0.0,
        sick: str = "",
        unplugged: str = "",
        exaggeration: float = 40.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._pause_s, self._fails, self._exaggeration = pause_s, fails, exaggeration
        self._sick, self._unplugged = Path(sick or "/nonexistent"), Path(unplugged or "/nonexistent")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the digits' own loss after the pause."""
        time.sleep(self._pause_s)
        if self._unplugged.exists() or random.random() < self._fails:  # noqa: S311 - not for secrets
            raise RuntimeError("the camera is unplugged")
        loss = super().loss(output, target)
        return loss * self._exaggeration if self._sick.exists() else loss
