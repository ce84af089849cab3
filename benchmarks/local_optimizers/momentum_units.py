"""FedCM with AdamW: accuracy by the units of its momentum Delta.

    plain      Delta = mean delta / (-eta K);   AdamW gets a g + (1 - a) Delta        `inexact = true`
    rescaled   the same, with Delta at each step scaled to the length of g
    gradient   Delta = mean of the clients' gradients g;   AdamW gets a g + (1 - a) Delta
    movement   Delta = mean delta / (-eta K);   the step is a AdamW(g) + (1 - a) Delta
    none       no Delta: FedAvg with AdamW

With AdamW a delta has the units of normalised steps, not of a gradient: `plain` adds the two. Digits, split by a
Dirichlet distribution; the state of AdamW starts anew in each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import mean, stdev

import torch
from torch import nn

from algorithms import tree
from algorithms.base import Tensors
from algorithms.model_state import trainable_views
from algorithms.optimizers.spec import OptimizerSpec
from algorithms.optimizers.steps import LocalOptimizer
from fl_tasks.base import Shard
from fl_tasks.built_in.digits import Digits
from fl_tasks.partitioning.partition import make_partition
from fl_tasks.partitioning.spec import PartitionSpec

VARIANTS = ("none", "plain", "rescaled", "gradient", "movement")
CLIENTS, COHORT, EPOCHS, BATCH = 20, 4, 2, 16
ADAMW = LocalOptimizer(OptimizerSpec("adamw", {"weight_decay": 0.01}))


class Federation:
    """The model, the clients' data and Delta."""

    def __init__(self, seed: int, spread: float) -> None:
        self.task = Digits()
        torch.manual_seed(seed)
        self.model: nn.Module = self.task.model()
        self.y = trainable_views(self.model)
        self.Delta: Tensors = tree.full_like(self.y, 0.0)
        spec = PartitionSpec("dirichlet", CLIENTS, alpha=spread, seed=seed)
        self.parts = make_partition(spec, self.task.train_labels())
        self._draw = torch.Generator().manual_seed(seed)

    def round(self, variant: str, alpha: float, rate: float) -> None:
        """One round of a variant. In the first one Delta is 0, so that it has no share."""
        x, share = tree.map(torch.clone, self.y), alpha if float(tree.norm(self.Delta)) else 1.0
        moved, Delta = tree.full_like(x, 0.0), tree.full_like(x, 0.0)
        for client in torch.randperm(CLIENTS, generator=self._draw)[:COHORT].tolist():
            tree.copy_(self.y, x)
            gradients, steps = self._train(client, variant, 1.0 if variant == "none" else share, rate)
            delta = tree.subtract(self.y, x)
            moved = tree.add(moved, delta, 1.0 / COHORT)
            unit = (gradients, 1.0 / steps) if variant == "gradient" else (delta, -1.0 / (rate * steps))
            Delta = tree.add(Delta, unit[0], unit[1] / COHORT)
        tree.copy_(self.y, tree.add(x, moved))
        self.Delta = Delta

    def _train(self, client: int, variant: str, share: float, rate: float) -> tuple[Tensors, int]:
        """The sum of the client's gradients, and its steps."""
        optimizer, total, steps = ADAMW.begin(self.y), tree.full_like(self.y, 0.0), 0
        for inputs, targets in self._batches(client):
            self.model.zero_grad()
            self.task.loss(self.model(inputs), targets).backward()
            g = {
                name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None
            }
            total, steps = tree.add(total, g), steps + 1
            if variant == "movement":
                optimizer.step(g, rate * share)
                tree.add_(self.y, self.Delta, -rate * (1.0 - share))
                continue
            Delta = self.Delta
            if variant == "rescaled" and share < 1.0:
                Delta = tree.scale(Delta, tree.norm(g) / tree.norm(Delta))
            optimizer.step(tree.add(tree.scale(g, share), Delta, 1.0 - share), rate)
        return total, steps

    def _batches(self, client: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data = self.task.train_data(Shard(self.parts[client]))
        for _ in range(EPOCHS):
            for indices in torch.randperm(len(data), generator=self._draw).split(BATCH):
                yield data.inputs[indices], data.targets[indices]

    @torch.no_grad()
    def accuracy(self) -> float:
        """On the held-out scans."""
        held_out = self.task.eval_data()
        return float((self.model(held_out.inputs).argmax(1) == held_out.targets).float().mean())


def final_accuracy(variant: str, alpha: float, rate: float, seed: int, rounds: int, spread: float) -> float:  # noqa: PLR0913, PLR0917 - the table's coordinates
    """Mean accuracy after each of the last five rounds."""
    federation, found = Federation(seed, spread), []
    for _ in range(rounds):
        federation.round(variant, alpha, rate)
        found.append(federation.accuracy())
    return mean(found[-5:])


def main() -> None:
    """Print a row for each learning rate, alpha and variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--spread", type=float, default=0.3, help="alpha of the Dirichlet distribution")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.003])
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.5])
    options = parser.parse_args()
    print("| learning rate | alpha | Delta | accuracy | standard deviation |\n|---|---|---|---|---|")
    for rate in options.rates:
        for alpha in options.alphas:
            for variant in VARIANTS:
                if variant == "none" and alpha != options.alphas[0]:
                    continue
                found = [
                    final_accuracy(variant, alpha, rate, seed, options.rounds, options.spread)
                    for seed in range(options.seeds)
                ]
                shown = "" if variant == "none" else f"{alpha:g}"
                print(f"| {rate:g} | {shown} | {variant} | {mean(found):.3f} | {stdev(found):.3f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
