"""Bytes, speed and error of every encoding, for the layout of a ResNet-18.

    python -m benchmarks.encodings --repeats 15
    python -m benchmarks.encodings --only int8 eden4

Encodings alternate within a repeat, so that other load on the machine affects all alike; the speed is the median. It is
in bytes of the plain float32 bundle per second, by wall time and by processor time of the one thread that works. Prints
one JSON line with the options and the machine, one for each encoding, and the rows of the table, which have the speed
by processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.demo_grid import machine
from benchmarks.table import markdown
from fl_common.allocator import keep_freed_memory
from fl_tasks.models import ResNet18
from protos.encodings import ENCODINGS, EncodedLayout, EncodingSpec, decode, encode, encoding_key
from protos.layout import Layout

SPARSE = ("topk", "randk")
GB = 1e9


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration: wall time, and processor time of this thread."""

    wall: float
    cpu: float


def specs(fraction: float) -> dict[str, EncodingSpec]:
    """Every encoding; the sparse ones send this fraction."""
    return {name: EncodingSpec(name, fraction if name in SPARSE else 0.0) for name in ENCODINGS}


def bundle(heavy_tailed: bool) -> dict[str, Tensor]:
    """Random values for the parameters of a ResNet-18: normal, or Student's t with 3 degrees of freedom."""
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(p.shape, generator=draw) for name, p in ResNet18().named_parameters()}
    if not heavy_tailed:
        return tensors
    return {name: x / torch.randn(3, *x.shape, generator=draw).square().mean(0).sqrt() for name, x in tensors.items()}


def relative_error(tensors: Mapping[str, Tensor], encoded: EncodedLayout) -> float:
    """|decoded - x| / |x| over all values."""
    key = encoding_key(1, "error")
    decoded = decode(encode(tensors, encoded, key), encoded, key)
    error = sum(float((decoded[name] - x).double().square().sum()) for name, x in tensors.items())
    return float((error / sum(float(x.double().square().sum()) for x in tensors.values())) ** 0.5)


def once(tensors: Mapping[str, Tensor], encoded: EncodedLayout, key: bytes) -> tuple[Seconds, Seconds]:
    """The durations of encoding and decoding."""
    wall, cpu = time.perf_counter(), time.thread_time()
    buffer = encode(tensors, encoded, key)
    encoding = Seconds(time.perf_counter() - wall, time.thread_time() - cpu)
    wall, cpu = time.perf_counter(), time.thread_time()
    decode(buffer, encoded, key)
    return encoding, Seconds(time.perf_counter() - wall, time.thread_time() - cpu)


def measure(chosen: Mapping[str, EncodingSpec], repeats: int) -> list[dict[str, Any]]:
    """One result for each encoding."""
    normal, heavy = bundle(heavy_tailed=False), bundle(heavy_tailed=True)
    layout = Layout.of(normal, list(normal))
    encoded = {name: EncodedLayout.of(layout, spec) for name, spec in chosen.items()}
    errors = {name: (relative_error(normal, coded), relative_error(heavy, coded)) for name, coded in encoded.items()}
    taken: dict[str, list[tuple[Seconds, Seconds]]] = defaultdict(list)
    for repeat in range(repeats):
        order = list(encoded) if repeat % 2 else list(reversed(encoded))
        for name in order:
            taken[name].append(once(normal, encoded[name], encoding_key(repeat)))
    return [
        {
            "encoding": str(chosen[name]),
            "bytes": coded.size_bytes,
            "share": round(coded.size_bytes / layout.size_bytes, 4),
            **speeds(layout.size_bytes, taken[name]),
            "error_normal": round(errors[name][0], 4),
            "error_heavy_tailed": round(errors[name][1], 4),
        }
        for name, coded in encoded.items()
    ]


def speeds(size_bytes: int, taken: Sequence[tuple[Seconds, Seconds]]) -> dict[str, float]:
    """Medians in GB/s."""
    seconds = {
        "encode": [encoding.wall for encoding, _ in taken],
        "encode_cpu": [encoding.cpu for encoding, _ in taken],
        "decode": [decoding.wall for _, decoding in taken],
        "decode_cpu": [decoding.cpu for _, decoding in taken],
    }
    return {f"{name}_gb_s": round(size_bytes / GB / statistics.median(samples), 2) for name, samples in seconds.items()}


def row(result: Mapping[str, Any]) -> dict[str, str]:
    """A row of the page's table."""
    return {
        "encoding": f"`{result['encoding']}`",
        "bytes": f"{100 * result['share']:.1f} %",
        "encode, GB/s": f"{result['encode_cpu_gb_s']:.2f}",
        "decode, GB/s": f"{result['decode_cpu_gb_s']:.2f}",
        "error, normal": f"{result['error_normal']:.4f}",
        "error, heavy-tailed": f"{result['error_heavy_tailed']:.4f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the encodings and print a line for each, and a table."""
    parser = argparse.ArgumentParser(description="Bytes, speed and error of the encodings of bundles.")
    parser.add_argument("--only", choices=tuple(ENCODINGS), nargs="+", default=tuple(ENCODINGS))
    parser.add_argument("--fraction", type=float, default=0.01, help="share of the values that topk and randk send")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # As daemons and simulations do.
    keep_freed_memory()
    print(json.dumps({**vars(options), "machine": machine()}), flush=True)
    chosen = {name: spec for name, spec in specs(options.fraction).items() if name in options.only}
    results = measure(chosen, options.repeats)
    for result in results:
        print(json.dumps(result))
    print("\n".join(markdown(row(result) for result in results)))


if __name__ == "__main__":
    main()
