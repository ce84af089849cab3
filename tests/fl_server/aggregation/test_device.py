"""The server's part of a round on another device than the CPU, where each value that is read waits for the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import algorithms as fl
from fl_server.admission.buffer_rules import buffer_facts
from fl_server.admission.client_rules import RegisteredData
from fl_server.admission.gate import Collecting, build_gate
from fl_server.admission.norms import NormHistory
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.updates import HeldUpdate
from fl_server.run_settings.spec import from_values
from protos.codec import Entry
from tests.marks import slow_except
from tests.skipping import suited

ELSEWHERE = torch.device("meta")
"""Tensors without values: an operation of such a tensor and one on the CPU fails, and so does a copy to the CPU."""
TASK: Any = SimpleNamespace(model=lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}


class Reads(TorchFunctionMode):
    """Counts reads of values that are elsewhere, which are ones then."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See torch."""
        if getattr(func, "__name__", "") in READS and args[0].device == ELSEWHERE:
            self.count += 1
            args = (torch.ones(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


class Held(HeldUpdate):
    """An update that is elsewhere."""

    @property
    def device(self) -> torch.device:
        """See `HeldUpdate`."""
        return ELSEWHERE

    def read(self, entry: Entry, start: int, count: int) -> Tensor:
        """See `HeldUpdate`."""
        return torch.empty(count, dtype=entry.dtype, device=ELSEWHERE)


class HeldTogether(Held):
    """One that is read together with others."""

    def read_with(self, others: Sequence[object], entry: Entry, start: int, count: int) -> Tensor:
        """See `HeldUpdate`."""
        return torch.empty(len(others), count, dtype=entry.dtype, device=ELSEWHERE)


def reads_of_a_round(method: str, kind: type[Held], clients: int, **round_: Any) -> int:
    """Reads of values in a round of all exchanges; the next snapshot is elsewhere as well."""
    sections: dict[str, Any] = {"algorithm": {"name": method}, "population": 9, "population_examples": 90}
    sections["round"] = round_
    sections["averaging"] = {"method": "ema", "decay": 0.9}
    content = suited({"task": {"name": "any"}, "round": {}, "local": {}, **sections}, 9)
    engine = Engine(from_values(content), TASK, ELSEWHERE)
    cohort, updates = [fl.UpdateInfo(f"c{number}", 10, 2) for number in range(clients)], [kind()] * clients
    sums: dict[str, fl.Tensors] = {}
    with Reads() as reads:
        snapshot = engine.first()
        reads.count = 0
        for exchange in range(len(engine.algorithm.exchanges) - 1):
            sent = engine.outgoing(snapshot, exchange, sums)
            sums |= engine.reduce(snapshot, exchange, cohort, updates)
        sent = engine.outgoing(snapshot, len(engine.algorithm.exchanges) - 1, sums)
        after, _ = engine.server_update(snapshot, cohort, updates, sums)
        assert after.averaged is not None
        averaged = after.averaged.in_memory().values()
        found: int = reads.count
    kept = [after.sent, averaged, *after.state.memory.values(), *(bundle.tensors for bundle in sent)]
    assert {tensor.device for tensors in kept for tensor in tensors.values()} == {ELSEWHERE}
    return found


@pytest.mark.parametrize("method", slow_except(fl.names(), "fedcm", "scaffold", "mime", "fedrobust"))
def test_a_round_reads_few_values_however_many_clients_it_has(method: str) -> None:
    """Sums, server step and bundles of each method stay there; norms are read once for all clients and tensors."""
    for kind in (Held, HeldTogether):
        few, many = (reads_of_a_round(method, kind, clients) for clients in (2, 7))
        assert few == many <= 4


@pytest.mark.parametrize("reducer", ["median", "trimmed_mean", "krum"])
def test_a_robust_round_reads_few_values_too(reducer: str) -> None:
    """Centres stay there, those of buffers too; the distances of a selection are read at once."""
    enough = {"clients_per_round": 9, "quorum": 5}
    for kind in (Held, HeldTogether):
        few, many = (reads_of_a_round("fedavg", kind, clients, reducer=reducer, **enough) for clients in (5, 9))
        assert few == many <= 5


def reads_of_admission(clients: int) -> int:
    """Reads of values for the norms of a cohort, whose updates have buffers, at a gate."""
    engine = Engine(from_values({"task": {"name": "any"}}), TASK, ELSEWHERE)
    shape = engine.shapes[0]
    with Reads() as reads:
        snapshot = engine.first()
        gate = build_gate(engine, Collecting(snapshot, 0, 0, NormHistory()), "c", RegisteredData(10))
        reads.count = 0
        facts = buffer_facts([HeldTogether()] * clients, shape.layout_of("delta").entries, snapshot.buffers)
        norms = gate.usual_norms([[1.0] * len(shape.entries)] * clients, facts)
        found: int = reads.count
    assert [set(of_client or ()) for of_client in norms] == [{"delta", "buffers"}] * clients
    return found


def test_admission_reads_the_buffers_of_a_cohort_at_once() -> None:
    """Finiteness, distances and limits of the batch norms of all clients are one read."""
    assert (reads_of_admission(2), reads_of_admission(7)) == (1, 1)
