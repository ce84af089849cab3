"""What a round costs without training: a real coordinator and real daemons on loopback, production settings.

    python -m benchmarks.round_overhead --clients 10 --params 11173962 --rounds 5 --algorithm fedcm

Prints one JSON line. It fails if the model that comes out is not the one that must.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from benchmarks.constant_task import STEP
from fl_ops.admin_client import AdminClient
from fl_ops.demo.processes import Child, Processes
from fl_ops.settings import Connection
from protos.fl.v1 import admin_pb2

TASK = "benchmarks.constant_task:ConstantTask"
ALPHA = 0.5
"""FedCM's local share; a power of two keeps the expected model exact."""
PATIENCE_S = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one case and print it."""
    parser = argparse.ArgumentParser(description="What a round costs without training.")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--params", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=62)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithm", choices=("fedavg", "fedcm"), default="fedavg")
    parser.add_argument("--json", action="store_true", help="taken and not needed: it always prints JSON")
    with tempfile.TemporaryDirectory(prefix="round-overhead-") as folder:
        print(json.dumps(measure(parser.parse_args(arguments), Path(folder))))


def measure(case: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, run, look, stop."""
    with Processes(folder) as processes:
        began = time.monotonic()
        server = processes.start("server", "fl_server", _server_settings(folder))
        addresses = _addresses(server)
        clients = [
            processes.start(f"client-{index}", "fl_client", _client_settings(case, folder, index, addresses["listen"]))
            for index in range(case.clients)
        ]
        with AdminClient(Connection(addresses["admin_listen"])) as admin:
            run = admin.create_run(_spec(case)).run_id
            rounds = _rounds(admin, run, case.rounds)
            first = time.monotonic() - began - sum(each.seconds for each in rounds[1:])
            model = folder / "model.safetensors"
            _export(admin, run, model)
        _check(case, load_file(model))
        seconds = [each.seconds for each in rounds]
        return {
            "clients": case.clients,
            "params": case.params,
            "tensors": case.tensors,
            "algorithm": case.algorithm,
            "round_s": [round(each, 4) for each in seconds],
            "round_s_median": round(statistics.median(seconds), 4),
            "server_rss_mb": _peak_mb(server),
            "server_cpu_s_per_round": round(_cpu_s(server) / case.rounds, 3),
            "client_rss_mb": {"peak": max(map(_peak_mb, clients)), "median": statistics.median(map(_peak_mb, clients))},
            "bytes_down": sum(each.bytes_down for each in rounds),
            "bytes_up": sum(each.bytes_up for each in rounds),
            "start_to_first_round_s": round(first, 2),
        }


def _server_settings(folder: Path) -> Path:
    return _write(
        folder / "server.toml",
        f'state_dir = "{folder / "state"}"\nlisten = "127.0.0.1:0"\nadmin_listen = "127.0.0.1:0"\n'
        'metrics_listen = "127.0.0.1:0"\ninsecure = true\nlog = "json"\n',
    )


def _client_settings(case: argparse.Namespace, folder: Path, index: int, server: str) -> Path:
    return _write(
        folder / f"client-{index}.toml",
        f'client_id = "client-{index:03d}"\nserver = "{server}"\nstate_dir = "{folder / f"client-{index}"}"\n'
        f'insecure = true\nlog = "json"\n[task]\nname = "{TASK}"\n'
        f"options = {{parameters = {case.params}, tensors = {case.tensors}}}\n",
    )


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _addresses(server: Child) -> dict[str, str]:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        for line in server.log.read_text().splitlines():
            if '"serving"' in line and line.endswith("}"):
                found: dict[str, str] = json.loads(line)
                return found
        time.sleep(0.05)
    raise SystemExit(f"the coordinator does not serve; see {server.log}")


def _spec(case: argparse.Namespace) -> admin_pb2.RunSpec:
    spec = admin_pb2.RunSpec(name="overhead", seed=0)
    spec.task.name = TASK
    spec.task.options.update({"parameters": case.params, "tensors": case.tensors})
    spec.algorithm.name = case.algorithm
    if case.algorithm == "fedcm":
        spec.algorithm.parameters.update({"alpha": ALPHA})
    spec.local.learning_rate = 1.0
    spec.round.clients_per_round = spec.round.min_clients = case.clients
    spec.stop.rounds = case.rounds
    spec.evaluation.every = 0
    return spec


def _rounds(admin: AdminClient, run: str, wanted: int) -> list[admin_pb2.RoundSummary]:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        answer = admin.get_run(run)
        if len(answer.rounds) == wanted:
            return list(answer.rounds)
        time.sleep(0.2)
    raise SystemExit(f"{len(answer.rounds)} of {wanted} rounds after {PATIENCE_S:g} s: {answer.run.reason}")


def _export(admin: AdminClient, run: str, path: Path) -> None:
    with path.open("wb") as file:
        for part in admin.export_model(run, "latest"):
            if part.HasField("chunk"):
                file.write(part.chunk.data)


def _check(case: argparse.Namespace, model: dict[str, torch.Tensor]) -> None:
    """Every parameter must be the sum of the steps: STEP a round, or FedCM's recurrence for it."""
    value, direction = 0.0, 0.0
    alpha = ALPHA if case.algorithm == "fedcm" else 1.0
    for _ in range(case.rounds):
        direction = -alpha * STEP + (1 - alpha) * direction
        value -= direction
    if not all(torch.allclose(tensor, torch.tensor(value), rtol=1e-6) for tensor in model.values()):
        raise SystemExit(f"the model is wrong: expected {value} everywhere, got {next(iter(model.values()))[:4]}")
    if math.isclose(value, 0.0):
        raise SystemExit("nothing was added")


def _peak_mb(child: Child) -> float:
    """Peak resident memory so far, as the kernel counts it."""
    for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return round(int(line.split()[1]) / 1024, 1)
    raise SystemExit("expected Linux's /proc with VmHWM")


def _cpu_s(child: Child) -> float:
    times = psutil.Process(child.process.pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
