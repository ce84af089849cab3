"""A task whose code ends its process, or tries to, in a place that the coordinator alone calls."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_tasks import Examples, Shard
from tests.processes.tiny_task import Tiny


class Own(BaseException):
    """An exception that is no Exception."""


def _raise(error: BaseException) -> None:
    raise error


ENDINGS: Mapping[str, Callable[[], object]] = {
    "exit": lambda: sys.exit(5),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "cancel": lambda: _raise(asyncio.CancelledError()),
    "own": lambda: _raise(Own("gone")),
    "crash": lambda: ctypes.string_at(0),
    "leave": lambda: os._exit(3),
    "hang": lambda: time.sleep(36_000),
    "hunger": lambda: torch.ones(1 << 31),
}


class Ending(Tiny):
    """`Tiny` with an ending in one place: "init", "model", "eval_data" or "metrics".

    when: a file; without it nothing ends. Empty: always.
    """

    def __init__(self, place: str = "", how: str = "", when: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._place, self._how, self._when = place, how, when
        self._end_in("init")

    def _end_in(self, place: str) -> None:
        if place == self._place and (not self._when or Path(self._when).exists()):
            ENDINGS[self._how]()

    def model(self) -> nn.Module:
        self._end_in("model")
        return super().model()

    def eval_data(self, shard: Shard | None = None) -> Examples:
        if shard is None:
            self._end_in("eval_data")
        return super().eval_data(shard)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        self._end_in("metrics")
        return super().metrics(output, target)
