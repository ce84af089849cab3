"""The client: it adds STEP to every parameter."""

from __future__ import annotations

import torch  # noqa: F401 - Flower makes tensors only if the app has imported torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

STEP = 2.0**-10

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, _context: Context) -> Message:
    """Return the model that came, plus STEP."""
    state = message.content["arrays"].to_torch_state_dict()
    arrays = ArrayRecord({name: tensor + STEP for name, tensor in state.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
