"""The client of the setting in Flower. A module of its own, because Flower's actors import it by name.

A client's images come from a file that the actors map into memory. An actor keeps its model for all of its clients.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.simulation import setting


@cache
def _model() -> nn.Module:
    torch.set_num_threads(1)
    return setting.new_model()


@cache
def _files(folder: str) -> tuple[Tensor, Tensor]:
    """All clients' images and labels, mapped privately: the pages are shared until someone writes."""
    inputs, targets = (torch.from_numpy(np.load(Path(folder) / f"{name}.npy", mmap_mode="c")) for name in ("x", "y"))
    return inputs, targets


def client_app(folder: str) -> ClientApp:
    """Trains the client of a partition id. folder: of the images and labels."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        model, (inputs, targets) = _model(), _files(folder)
        index = int(context.node_config["partition-id"])
        part = slice(index * setting.IMAGES, (index + 1) * setting.IMAGES)
        x, y = inputs[part], targets[part]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), setting.RATE)
        for chosen in torch.randperm(setting.IMAGES).split(setting.BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": setting.IMAGES})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app
