"""The setting in Flower's simulation (PyPI: flwr[simulation]): one Ray actor for each processor trains clients."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.simulation import setting
from benchmarks.simulation.peers.flower_client import client_app
from benchmarks.simulation.peers.rounds import Rounds


def _server_app(data: setting.Data, rounds: Rounds, count: int) -> ServerApp:
    app = ServerApp()
    model = setting.new_model()

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Called with the number of rounds that have ended."""
        if number == 0:
            rounds.begin()
            return None
        accuracy = None
        if rounds.evaluates(number - 1):
            model.load_state_dict(arrays.to_torch_state_dict())
            accuracy = setting.evaluate(model, data)
        rounds.ended(number - 1, accuracy)
        return None

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, _context: Context) -> None:
        share = setting.COHORT / setting.CLIENTS
        strategy = FedAvg(share, 0.0, setting.COHORT, min_available_nodes=setting.CLIENTS)
        strategy.start(grid, ArrayRecord(model.state_dict()), count, evaluate_fn=evaluate)

    return app


def main() -> None:
    """Train, and write the rounds' times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(setting.SEED)
    data = setting.load_data(setting.data_root())
    with tempfile.TemporaryDirectory(prefix="flower-data-") as folder:
        for name, tensor in (("x", data.inputs), ("y", data.targets)):
            np.save(Path(folder) / f"{name}.npy", tensor.numpy())
        run_simulation(
            _server_app(data, Rounds(options.report, options.rounds), options.rounds),
            client_app(folder),
            num_supernodes=setting.CLIENTS,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )


if __name__ == "__main__":
    main()
