"""The setting as a task, for `fl simulate`."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from benchmarks.simulation import setting
from benchmarks.simulation.stored import stored
from fl_tasks import Examples, Shard
from fl_tasks.base import Classifier


class Cifar10Iid(Classifier):
    """CIFAR-10 among 1,000 clients. All shards are views of one set in memory."""

    @cached_property
    def _data(self) -> setting.Data:
        return setting.load_data(stored(setting.data_root()))

    def model(self) -> nn.Module:
        """The model of the setting."""
        return setting.new_model()

    def train_data(self, shard: Shard) -> Examples:
        """The examples of the shard."""
        return shard.of(Examples(self._data.inputs, self._data.targets))

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """10,000 images for the server; none for clients."""
        whole = Examples(self._data.eval_inputs, self._data.eval_targets)
        return whole if shard is None else whole[:0]

    def train_groups(self) -> Tensor:
        """The client of each image, so that all contenders have the same clients."""
        return torch.arange(setting.CLIENTS).repeat_interleave(setting.IMAGES)
