"""Trains the transformer of the task `shakespeare` on the public text, without federated learning.

The file that it writes is the task's option `base`. The public text is that of the speakers who are no clients; its
last tenth is held out, and the weights with the lowest loss there are kept.

    python examples/shakespeare/pretrain.py --data-root data --out base.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_tasks.batches import batches, seed_everything
from fl_tasks.built_in.shakespeare import Shakespeare
from fl_tasks.evaluation import evaluate


def main() -> None:
    """Read the options, train, and write the best weights."""
    parser = argparse.ArgumentParser(description="Train the transformer of the task shakespeare on the public text.")
    parser.add_argument("--data-root", default="data", help="folder above tinyshakespeare/input.txt")
    parser.add_argument("--out", type=Path, default=Path("base.safetensors"), help="safetensors file to write")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--least-characters", type=int, default=2000, help="as the task's option")
    options = parser.parse_args()
    task = Shakespeare(options.data_root, least_characters=options.least_characters)
    seed_everything(0)
    model = task.model()
    weights = pretrain(task, model, options.epochs)
    save_file(weights, options.out)
    model.load_state_dict(weights)
    clients = evaluate(task, model, task.eval_data())
    print(
        f"{options.out}: loss {clients['loss']:.4f}, accuracy {clients['accuracy']:.4f} on the clients' held-out text"
    )


def pretrain(task: Shakespeare, model: nn.Module, epochs: int) -> dict[str, Tensor]:
    """Train with AdamW. Returns the weights of the epoch with the lowest held-out loss."""
    text = task.public_text()
    end = len(text) - len(text) // 10
    train, held_out = text[:end], text[end:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    best, weights = float("inf"), model.state_dict()
    for epoch in range(epochs):
        model.train()
        for inputs, targets in batches(train, 32, seed=epoch, epochs=1):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        loss = evaluate(task, model, held_out)["loss"]
        print(f"epoch {epoch + 1}: held-out loss {loss:.4f}", flush=True)
        if loss < best:
            best, weights = loss, {name: value.clone() for name, value in model.state_dict().items()}
    return weights


if __name__ == "__main__":
    main()
