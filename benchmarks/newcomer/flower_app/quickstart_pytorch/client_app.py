"""The client: it trains on its own images."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart_pytorch.task import IMAGES, network, train

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def fit(message: Message, context: Context) -> Message:
    """Train the model that came."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(model, int(context.node_config["partition-id"]), float(context.run_config["learning-rate"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": IMAGES})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )
