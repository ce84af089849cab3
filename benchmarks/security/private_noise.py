"""Cost of client-level privacy for a round's sum: the noisy mean of a private run beside FedAvg's plain mean.

    python -m benchmarks.security.private_noise [--values 11200000] [--clients 10]

Both read the same updates from files, as a coordinator does, alternating in one process; a fresh process for each
measures the memory. Prints JSON: seconds of each repetition, their ratio, and the growth of the resident memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch

import algorithms as fl
from benchmarks.crowds.processes import worker_pool
from fl_server.aggregation.privacy import Mechanism, PrivateSum
from fl_server.aggregation.reduction import Reduction
from fl_server.aggregation.updates import AcceptedUpdates, UpdateShape
from fl_server.run_settings.sections import RoundSection
from protos.codec import pack
from protos.layout import Layout

_SPAWN = multiprocessing.get_context("spawn")
_TENSORS = 62
"""Tensors of one model, as ResNet-18 with group norm has."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=11_200_000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=5)
    case = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="private-noise-") as folder:
        _write(Path(folder), case.values, case.clients)
        plain, private = (_reduction(Path(folder), case.values, private=wanted) for wanted in (False, True))
        times = [(_seconds(plain), _seconds(private)) for _ in range(case.repetitions)]
        growth = {
            name: _in_a_process(Path(folder), case.values, wanted)
            for name, wanted in (("plain", False), ("private", True))
        }
    print(
        json.dumps(
            {
                "values": case.values,
                "clients": case.clients,
                "plain_s": [round(plain_s, 3) for plain_s, _ in times],
                "private_s": [round(private_s, 3) for _, private_s in times],
                "ratio": round(statistics.median(private_s / plain_s for plain_s, private_s in times), 2),
                "memory_mib": growth,
            }
        )
    )


def _layout(values: int) -> Layout:
    share = values // _TENSORS
    sizes = [share] * (_TENSORS - 1) + [values - share * (_TENSORS - 1)]
    like = {f"layer{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    return Layout.of(like, trainable=[*like])


def _write(folder: Path, values: int, clients: int) -> None:
    layout, numbers = _layout(values), torch.Generator().manual_seed(1)
    for client in range(clients):
        delta = {entry.name: torch.randn(entry.shape, generator=numbers) for entry in layout.entries}
        (folder / f"{client:03d}").write_bytes(pack(delta, layout))


def _reduction(folder: Path, values: int, *, private: bool) -> Reduction:
    """A round of FedAvg over the files of a folder."""
    sources, layout = sorted(folder.iterdir()), _layout(values)
    clip = 1.0 / values**0.5  # of the length that such updates have, so that each is of norm 1
    cohort = [fl.UpdateInfo(f"c{number}", 1, 1, clip) for number in range(len(sources))]
    return Reduction(
        fl.build("fedavg"),
        0,
        RoundSection(clients_per_round=len(sources)),
        fl.RoundInfo(0, 0.1),
        AcceptedUpdates(cohort, sources, UpdateShape.of(("delta",), layout, layout)),
        torch.device("cpu"),
        special=PrivateSum(Mechanism(1.0, 1.0, len(sources)), values, bytes(32)) if private else None,
    )


def _seconds(reduction: Reduction) -> float:
    began = time.perf_counter()
    reduction.sums()
    return time.perf_counter() - began


def _in_a_process(folder: Path, values: int, private: bool) -> float:
    with worker_pool(1) as pool:
        return pool.submit(_growth, folder, values, private).result()


def _growth(folder: Path, values: int, private: bool) -> float:
    """MiB by which the largest resident size grows during one reduction."""
    torch.set_num_threads(1)
    reduction = _reduction(folder, values, private=private)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = peak_mib()
    reduction.sums()
    return round(peak_mib() - before, 1)


def peak_mib() -> float:
    """The largest resident size. That of `getrusage` is the parent's until it is exceeded."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
