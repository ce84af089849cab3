"""A rank of a daemon that is not rank 0: `python -m fl_client.ranks.member`, started by the daemon alone.

It reads its order, one line of JSON, from its standard input, loads the task with the daemon's settings, and trains
with the others until its standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from threading import Thread

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's types lack it

from fl_client.ranks.daemon import START_S
from fl_client.ranks.group import Group, bundles_of, join, take
from fl_client.settings import device as devices
from fl_client.settings.config import ClientConfig
from fl_client.storage.state import StateDir
from fl_client.training.data import load_local_task
from fl_client.training.methods import load_optimizers_of
from fl_client.training.trainer import Trainer


def main() -> None:
    """Train with the others until the daemon ends."""
    order = json.loads(sys.stdin.readline())
    Thread(target=_end_with_the_daemon, name="daemon", daemon=True).start()
    config, group = ClientConfig.model_validate(order["config"]), Group(order["rank"], order["size"])
    torch.set_num_threads(config.threads)
    device = devices.of_rank(devices.choose(config.device), group.rank)
    local = load_local_task(config, StateDir(config.state_dir), device)
    compute = devices.Compute(config.precision, config.memory_format)
    trainer = Trainer(local, compute=compute, optimizers=load_optimizers_of(config.optimizers), together=group)
    store = TCPStore("127.0.0.1", order["port"], timeout=timedelta(seconds=START_S))
    store.set(f"ready/{group.rank}", "yes")
    messages = join(store, group, device)
    while True:
        assignment, tensors, state = take(messages)
        trainer.train_along(assignment, bundles_of(tensors, trainer.layouts(assignment)), state)


def _end_with_the_daemon() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
