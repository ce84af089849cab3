"""The server: FedAvg over both clients; it saves the final model."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart_pytorch.task import network

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    start = ArrayRecord(network().state_dict())
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=2)
    result = strategy.start(grid, start, int(context.run_config["num-server-rounds"]))
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
