"""The setting in pfl-research (PyPI: pfl), as its benchmarks/image_classification/pytorch/train.py runs it.

Run it alone, with torch's own number of threads, or in several processes with torchrun, whose processes have one
thread each.
"""

from __future__ import annotations

import argparse
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics, StringMetricName, Weighted, get_overall_value
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.simulation import setting
from benchmarks.simulation.peers.rounds import Rounds


def _loss(self: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    self.train()
    return functional.cross_entropy(self(inputs), targets)


@torch.no_grad()
def _metrics(self: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
    self.eval()
    correct = (self(inputs).argmax(1) == targets).float().sum().item()
    return {"accuracy": Weighted(correct, len(inputs))}


class _Evaluation(CentralEvaluationCallback):  # type: ignore[misc]  # pfl is not installed here
    """pfl's evaluation on the central set, in the rounds of the setting."""

    def __init__(self, dataset: Dataset, rounds: Rounds) -> None:
        super().__init__(dataset, NNEvalHyperParams(local_batch_size=setting.EVALUATION_BATCH))
        self._rounds = rounds

    def on_train_begin(self, *, model: Any) -> Metrics:
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        return self._eval(model) if self._rounds.evaluates(central_iteration) else (False, Metrics())


class _Report(TrainingProcessCallback):  # type: ignore[misc]  # the same
    """Writes each round's time; the last one of the callbacks."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._rounds.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        name = StringMetricName("Central val | accuracy")
        accuracy = get_overall_value(aggregate_metrics[name]) if name in aggregate_metrics else None
        self._rounds.ended(central_iteration, accuracy)
        return False, Metrics()


def main() -> None:
    """Train, and write the rounds' times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(setting.SEED)
    np.random.seed(setting.SEED)  # noqa: NPY002 - pfl draws with numpy's global generator
    device = get_default_device()
    data = setting.load_data(setting.data_root())
    inputs, targets = data.inputs.to(device), data.targets.to(device)
    parts = zip(inputs.split(setting.IMAGES), targets.split(setting.IMAGES), strict=True)
    sampler = get_user_sampler("random", range(setting.CLIENTS))
    users = FederatedDataset.from_slices(list(parts), sampler)
    module: Any = setting.new_model().to(device)
    module.loss, module.metrics = types.MethodType(_loss, module), types.MethodType(_metrics, module)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    # Every process reports; the first one's file is read.
    rank = int(os.environ.get("RANK", "0"))
    rounds = Rounds(
        options.report if rank == 0 else options.report.with_stem(f"{options.report.stem}-{rank}"), options.rounds
    )
    central = Dataset(raw_data=[data.eval_inputs.to(device), data.eval_targets.to(device)])
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(options.rounds, setting.EVALUATION_EVERY, setting.COHORT, 0),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=setting.RATE, local_batch_size=setting.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=setting.EVALUATION_BATCH),
        callbacks=[_Evaluation(central, rounds), _Report(rounds)],
    )


if __name__ == "__main__":
    main()
