"""How many clients train in lockstep together: as many as memory has room for."""

from __future__ import annotations

import torch

from algorithms.batched.choice import bytes_of_client
from algorithms.outside_code import is_interrupt
from fl_ops.simulate.engines.client_work import ClientWork, one_thread
from fl_ops.simulate.engines.engine import Bundles
from fl_ops.simulate.engines.groups import Client
from fl_ops.simulate.engines.held import free_bytes
from protos.fl.v1.training_pb2 import Assignment

CPU_BYTES = 1 << 30
"""Memory of a group on a CPU."""
GPU_SHARE = 0.5
"""The share of a GPU's free memory that is used."""
MOST_CLIENTS = 64
"""The most clients in one group: from some size on, larger groups are not faster."""


class GroupSizes:
    """The size of the next group: of the options, else by an estimate, a recorded step, and attempts that failed."""

    def __init__(self, work: ClientWork, device: torch.device, wanted: int) -> None:
        """wanted: 0: as many as memory allows, at most MOST_CLIENTS."""
        self._work, self._device, self._wanted = work, device, wanted
        self.most = wanted
        """The most clients of a group; 0: not known yet."""
        self._client_bytes = 0

    def of(self, common: Assignment, first: Client, bundles: Bundles) -> int:
        """The size, at first by the memory that the first client of the group needs."""
        if self.most:
            return self.most
        try:
            ready = self._work.assigned(common, *first).prepare(bundles)
            with one_thread():
                client_bytes = bytes_of_client(ready.model, ready.data, next(iter(ready.data.complete)))
        except BaseException as error:  # it is reported when the client trains
            if is_interrupt(error):
                raise
            return 1
        free = CPU_BYTES if self._device.type == "cpu" else GPU_SHARE * free_bytes(self._device)
        self.most = _clients_of(free, client_bytes)
        return self.most

    def halve(self, clients: int) -> int:
        """There was no memory for a group of so many clients. Returns the size from now on."""
        self.most = -(-clients // 2)
        return self.most

    def fit_recorded(self, client_bytes: int, clients: int) -> None:
        """Choose the size by the memory of a recorded step, which was measured, in place of the estimate."""
        if client_bytes > self._client_bytes and not self._wanted:
            free = free_bytes(self._device) + client_bytes * clients
            self.most = _clients_of(GPU_SHARE * free, client_bytes)
        self._client_bytes = client_bytes


def _clients_of(free: float, client_bytes: int) -> int:
    """Clients of a group whose memory is so large."""
    return max(1, min(MOST_CLIENTS, int(free // client_bytes)))
