"""Endless rounds of a device's storage, as a program that is killed: its folder is the argument."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from tests.fl_client.storages import leaves, outcome, storage, update

CLIP = 0.5

if __name__ == "__main__":
    for number in count(1):
        kept = storage(Path(sys.argv[1]))
        kept.save(update(number % 250), leaves(number % 250))
        print("sent", number, flush=True)  # noqa: T201 - among the lines of the log
        kept.settle(outcome(number % 250, clip_factor=CLIP))
