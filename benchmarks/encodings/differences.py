"""Bytes of the differences between the models of successive rounds, for each encoding.

    python -m benchmarks.encodings.differences --task fashion-mnist --model cnn-small --data-root DIR --rounds 12
    python -m benchmarks.encodings.differences --task cifar10 --model resnet18-gn-cifar --data-root DIR \
        --rounds 3 --clients 3 --steps 8 --rate 0.1

The models are those of a real training, as `fl simulate` does it, with updates of full precision. After each round its
model, and its direction if the method has one, are encoded with the key of the round, and the difference to that of the
round before is made and applied. Prints one JSON line for each round, bundle and encoding, and a table: bytes relative
to the bundle in the same encoding, and to float32, and the speed by processor time in bytes of the bundle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.table import markdown
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation
from fl_server.aggregation.outgoing import Outgoing, in_encoding, kind_name
from fl_server.run_settings.config import EncodingsSection, RunConfig
from protos.buffers import zeros
from protos.codec import Buffer, Layout, pack
from protos.differences import apply_difference, make_difference

ENCODINGS = ("plain", "bf16", "int8", "int4", "int2")
GB = 1e9


def training(options: argparse.Namespace) -> Iterator[tuple[RunConfig, list[Outgoing]]]:
    """The run's configuration, and what is sent after each round without an encoding, in memory of its own."""
    work = {"steps": options.steps} if options.steps else {"epochs": 1}
    given = {"model": options.model, "data_root": options.data_root}
    config = parse_simulation(
        {
            "seed": 1,
            "task": {"name": options.task, "options": {name: option for name, option in given.items() if option}},
            "algorithm": {"name": options.method},
            "local": {"learning_rate": options.rate, "batch_size": options.batch_size, **work},
            "round": {"clients_per_round": options.clients},
            "stop": {"rounds": options.rounds + 1},
            "evaluation": {"every": 0},
            "simulation": {"clients": 100, "partition": {"method": "dirichlet", "alpha": 0.3}},
        }
    )
    prepared = prepare(config, 1)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        for _ in simulation.rounds():
            federation = simulation.federation
            sent = federation.engine.outgoing(federation.snapshot)
            yield federation.config, [replace(bundle, tensors=_copied(bundle.tensors)) for bundle in sent]


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result for each round, bundle and encoding. The first round has no model before it."""
    before: dict[tuple[str, str], Buffer] = {}
    for round_, (config, sent) in enumerate(training(options)):
        for outgoing in sent:
            for encoding in ENCODINGS:
                encoded = _encoded(outgoing, config, encoding, round_)
                bundle = encoded.bundle() if encoding != "plain" else pack(outgoing.tensors, outgoing.layout)
                key = kind_name(outgoing.kind), encoding
                if key in before:
                    yield {
                        "round": round_,
                        "bundle": key[0],
                        "encoding": encoding,
                        **_one(before[key], bundle, encoded.word, outgoing.layout),
                    }
                before[key] = bundle


def _encoded(outgoing: Outgoing, config: RunConfig, encoding: str, round_: int) -> Outgoing:
    """A bundle as a run with this encoding sends it."""
    section = EncodingsSection.model_validate({"model": encoding, "direction": encoding, "difference": "previous"})
    return in_encoding(outgoing, config.model_copy(update={"encodings": section}), round_)


def _one(base: Buffer, bundle: Buffer, word: int, layout: Layout) -> dict[str, Any]:
    """Bytes and speed of one difference. It is as large as the bundle where none is sent."""
    began = time.thread_time()
    difference = make_difference(base, bundle, word)
    made = time.thread_time()
    if difference is not None:
        into = zeros(len(bundle))
        began_applying = time.thread_time()
        apply_difference(base, difference, word, into)
        applied = time.thread_time() - began_applying
        if into != bundle:
            raise SystemExit("expected the bundle from its difference, got other bytes")
    size = len(bundle) if difference is None else len(difference)
    return {
        "bundle_bytes": len(bundle),
        "difference_bytes": size,
        "to_bundle": round(size / len(bundle), 4),
        "to_float32": round(size / layout.size_bytes, 4),
        "make_gb_s": round(len(bundle) / GB / (made - began), 3),
        "apply_gb_s": None if difference is None else round(len(bundle) / GB / applied, 3),
    }


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """A row for each bundle and encoding."""
    for bundle, encoding in dict.fromkeys((row["bundle"], row["encoding"]) for row in found):
        rows = [row for row in found if (row["bundle"], row["encoding"]) == (bundle, encoding)]
        ratios = [row["to_bundle"] for row in rows]
        applied = [row["apply_gb_s"] for row in rows if row["apply_gb_s"] is not None]
        yield {
            "bundle": bundle,
            "encoding": f"`{encoding}`",
            "first, median, last": f"{ratios[0]:.2f}, {statistics.median(ratios):.2f}, {ratios[-1]:.2f}",
            "to float32, median": f"{statistics.median(row['to_float32'] for row in rows):.3f}",
            "make, GB/s": f"{statistics.median(row['make_gb_s'] for row in rows):.2f}",
            "apply, GB/s": f"{statistics.median(applied):.2f}" if applied else "-",
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, and print a line for each difference and a table."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    for result in measured(options):
        found.append(result)
        print(json.dumps(result), flush=True)
    print("\n".join(markdown(table(found))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Bytes of the differences between successive models.")
    parser.add_argument("--task", default="fashion-mnist")
    parser.add_argument("--model", default="", help="one of the task's models; the default is the task's")
    parser.add_argument("--data-root", default="", help="a torchvision folder with the data set, if the task needs one")
    parser.add_argument("--method", default="fedcm")
    parser.add_argument("--rounds", type=int, default=12, help="differences; one more round comes first")
    parser.add_argument("--clients", type=int, default=10, help="of 100, in each round")
    parser.add_argument("--steps", type=int, default=0, help="local steps; 0: one epoch")
    parser.add_argument("--rate", type=float, default=0.4, help="the clients' learning rate")
    parser.add_argument("--batch-size", type=int, default=25)
    return parser


if __name__ == "__main__":
    main()
