"""The server: FedAvg with all clients in every round. It writes when each round ended, and refuses a wrong model."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from app.client_app import STEP

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    clients, tensors, parameters = (int(config[key]) for key in ("clients", "tensors", "parameters"))
    sizes = [parameters // tensors + (index < parameters % tensors) for index in range(tensors)]
    model = {f"pieces.{index}": torch.zeros(size) for index, size in enumerate(sizes)}

    def ended(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Called with the number of rounds that have ended."""
        if number:
            with Path(str(config["ends"])).open("a") as file:
                file.write(f"{time.time()}\n")
            state = arrays.to_torch_state_dict()
            if not all(torch.allclose(tensor, torch.tensor(number * STEP)) for tensor in state.values()):
                raise ValueError(f"expected {number * STEP} everywhere after round {number}")
        return None

    strategy = FedAvg(1.0, 0.0, clients, min_available_nodes=clients)
    strategy.start(grid, ArrayRecord(model), int(config["rounds"]), evaluate_fn=ended)
