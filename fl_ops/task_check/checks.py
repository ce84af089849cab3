"""Tries a task on the data of this machine: the checks of a coordinator, of a device, and of what comes after a run."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from algorithms.batches import Batch, is_pair
from fl_client.training.data import local_data
from fl_client.training.local_model import trial_step
from fl_common.units import counted, size
from fl_ops.errors import Refused
from fl_ops.exports.formats import load_exported
from fl_ops.task_check.advice import advice_on
from fl_server.aggregation.task_model import TaskModel
from fl_server.store.checkpoint_files import separate
from fl_tasks import Examples, Shard, Task, TaskError, fingerprint, load_task
from fl_tasks.batches import batches
from fl_tasks.data.batched import Batched
from fl_tasks.data.forms import Data, as_data, forward_of
from fl_tasks.data.labels import class_names, numbered
from fl_tasks.errors import task_call
from fl_tasks.evaluation import evaluate
from fl_tasks.new_model import new_model, remarks_on

OK, REMARK, FAIL = "ok", "remark", "FAIL"

_CPU = torch.device("cpu")
_BATCH = 8
_COUNTED = 2000
"""Examples whose class numbers are counted."""


@dataclass(frozen=True)
class Finding:
    """What one check found. result: OK, REMARK or FAIL."""

    check: str
    result: str
    text: str


@dataclass(frozen=True)
class Site:
    """The data of one device, or all of the task's data."""

    name: str
    shard: Shard
    train: Data
    own: Data


def findings(name: str, options: Mapping[str, object], folders: Sequence[Path]) -> Iterator[Finding]:
    """What each check finds, up to the first one that fails.

    folders: of sites, each the data of one device; without them the task's whole training set is used.
    """
    try:
        task = load_task(name, options)
        version, source = fingerprint(task)
    except Exception as error:  # noqa: BLE001 - the task is the user's code, which may raise anything
        yield Finding("task", FAIL, explained(error))
        return
    yield Finding("task", OK, f"version {version!r}, {source}")
    trial = Trial(task, folders)
    checks: dict[str, Callable[[], Iterator[Finding] | str]] = {
        "model": trial.model,
        "data": trial.data,
        "labels": trial.labels,
        "step": trial.step,
        "evaluation": trial.evaluation,
        "determinism": trial.determinism,
        "small shards": trial.small_shards,
        "export": trial.export,
    }
    for check, run in checks.items():
        try:
            found = run()
            yield from [Finding(check, OK, found)] if isinstance(found, str) else found
        except Exception as error:  # noqa: BLE001 - the same
            yield Finding(check, FAIL, explained(error))
            return


def explained(error: Exception) -> str:
    """An error in one line, with what to do where its text is torch's."""
    text = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
    advice = advice_on(text)
    return f"{text.rstrip('.')}. This means: {advice}" if advice else text


class Trial:
    """One task under test. Its methods are called in the order of `findings`; each raises what is wrong."""

    def __init__(self, task: Task, folders: Sequence[Path]) -> None:
        self._task, self._folders = task, folders
        self._sites: list[Site] = []
        self._held_out: Data = Examples(torch.empty(0), torch.empty(0))
        self._trained: nn.Module

    def model(self) -> Iterator[Finding]:
        """The checks of a coordinator that creates a run."""
        model = TaskModel(self._task, seed=0)
        with model.first() as values:
            frozen = sum(tensor.nbytes for tensor in values.frozen.values())
        trained, sent = model.trainable_layout.size_bytes, model.layout.size_bytes
        yield Finding("model", OK, f"{size(trained)} trained, {size(sent - trained)} in buffers, {size(frozen)} frozen")
        yield from (Finding("model", REMARK, text) for text in remarks_on(new_model(self._task)))

    def data(self) -> str:
        """The data of each site and of the coordinator, and whether all sites have the same form."""
        shards = [(folder.name, Shard(folder=folder)) for folder in self._folders] or [("all data", Shard())]
        self._sites = [Site(name, shard, *local_data(self._task, shard, _CPU)) for name, shard in shards]
        with task_call("the task's eval_data()"):
            held_out = as_data(self._task.eval_data())
        self._held_out = numbered(self._task, held_out, "the held-out data of the coordinator")
        for site in self._sites:
            if not len(site.train):
                raise TaskError(f"expected at least one training example in {site.name}, got none")
        # Texts are padded to the longest of their batch: only examples in memory have the same sizes in all batches.
        forms = {
            site.name: shown_batch(self._batch(site), sizes=isinstance(site.train, Examples)) for site in self._sites
        }
        if len({*forms.values()}) > 1:
            raise TaskError(f"expected data of one form at all sites, got {'; '.join(map(': '.join, forms.items()))}")
        counts = ", ".join(f"{len(site.train)} in {site.name}" for site in self._sites)
        own = sum(len(site.own) for site in self._sites)
        return (
            f"examples to train on: {counts}; {len(self._held_out)} for the coordinator, {own} held out by devices;"
            f" a batch is {forms[self._sites[0].name]}"
        )

    def labels(self) -> Iterator[Finding]:
        """Whether the classes have names, and which sites lack some of them."""
        names = class_names(self._task)
        counts = {site.name: counted for site in self._sites if (counted := class_counts(site.train)) is not None}
        if not counts:
            yield Finding("labels", OK, "not one class number for each example: nothing to compare")
            return
        if not names:
            text = (
                "the task does not name its classes. Two sites that number the same classes differently would train a"
                ' model without a meaning, and no loss would show it: add classes = ["cat", "dog"] to the task, in the'
                " order of the numbers"
            )
            yield Finding("labels", REMARK, text)
            return
        shown = "; ".join(
            f"{site}: " + ", ".join(f"{number} {names[label]}" for label, number in sorted(counted.items()))
            for site, counted in counts.items()
        )
        yield Finding("labels", OK, f"{len(names)} classes by name. {shown}")
        present = {label for counted in counts.values() for label in counted}
        if absent := [name for label, name in enumerate(names) if label not in present]:
            yield Finding("labels", REMARK, f"no example here of {', '.join(absent)}: is the order of the names right?")

    def step(self) -> str:
        """One step with the data of the first site, on a model of the first values."""
        torch.manual_seed(0)
        self._trained = new_model(self._task)
        trial = trial_step(self._task, self._sites[0].train, self._trained, _CPU)
        if not math.isfinite(trial.loss):
            raise TaskError(f"expected a finite loss of the first batch, got {trial.loss}: check the data")
        return f"{counted(trial.examples, 'example')}, loss {trial.loss:.4f}, {1000 * trial.seconds:.0f} ms"

    def evaluation(self) -> str:
        """The metrics, one value for each example, over the coordinator's examples or those of the first site."""
        data = self._held_out if len(self._held_out) else self._sites[0].train
        return ", ".join(f"{name} {value:.4f}" for name, value in evaluate(self._task, self._trained, data).items())

    def determinism(self) -> str:
        """Whether model, data and a step are the same again: replays, resumes and comparisons depend on it."""
        first, second = (self._step_from_seed() for _ in range(2))
        for part, text in _NOT_REPEATED.items():
            if not same(first[part], second[part]):
                raise TaskError(text)
        return "model, data and a step are the same, bit for bit, when they are made again"

    def small_shards(self) -> Iterator[Finding]:
        """What a device gets that has no example, or one."""
        for what, attempt in (("no example", self._empty), ("one example", self._single)):
            try:
                yield Finding("small shards", OK, f"{what}: {attempt()}")
            except Exception as error:  # noqa: BLE001 - the task is the user's code
                text = f"a device with {what} would fail: {explained(error)}"
                yield Finding("small shards", REMARK, text)

    def export(self) -> Iterator[Finding]:
        """Whether a saved model can be loaded again, with the same values; training does not depend on it."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.safetensors")
            tensors = {name: value for name, value in self._trained.state_dict().items() if isinstance(value, Tensor)}
            save_file(separate(tensors), file)
            try:
                loaded = load_exported(self._task, file).state_dict()
            except Refused as error:
                yield Finding("export", REMARK, f"formats of `fl export` that need the model will fail: {error}")
                return
            if changed := [name for name, value in tensors.items() if not same(loaded[name], value)]:
                raise TaskError(f"the exported model has another value of {changed[0]!r} when it is loaded")
            text = f"{size(file.stat().st_size)} as safetensors, the same values when it is loaded"
            yield Finding("export", OK, text)

    def _batch(self, site: Site) -> Batch:
        return next(batches(site.train, min(_BATCH, len(site.train)), seed=0, steps=1))

    def _step_from_seed(self) -> dict[str, object]:
        """The parameters, the batch and the gradients of one step, made anew from seed 0."""
        torch.manual_seed(0)
        model = new_model(self._task)
        values = {name: value.detach().clone() for name, value in model.named_parameters()}
        site = self._sites[0]
        batch = self._batch(replace(site, train=local_data(self._task, site.shard, _CPU)[0]))
        torch.manual_seed(1)
        self._task.loss(*forward_of(self._task)(model, batch)).backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        return {"parameters": values, "batch": batch, "gradients": gradients}

    def _empty(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            by_index = Shard(indices=torch.tensor([], dtype=torch.int64))
            train, _ = local_data(self._task, Shard(folder=Path(folder)) if self._folders else by_index, _CPU)
            if len(train):
                raise TaskError(
                    f"expected no examples of an empty shard, got {len(train)}: does the task use the shard?"
                )
        return "train_data() returns none"

    def _single(self) -> str:
        data = self._sites[0].train
        if isinstance(data, Batched):
            return "not tried: the task makes its own batches"
        trial_step(self._task, data[torch.tensor([0])], new_model(self._task), _CPU)
        return "a step works"


_NOT_REPEATED = {
    "parameters": "model() has other values with the same seed: draw them with torch's own generator, without a seed of"
    " your own, and read files in a sorted order",
    "batch": "train_data() has other examples, or another order, when it is called again: sort the files"
    " (a folder has no order of its own), and draw nothing without a fixed seed",
    "gradients": "two equal steps have other gradients: draw random numbers with torch's own generator only, and keep"
    " nothing in the task from one step to the next",
}
"""Part of a step -> what is wrong if it is another one the second time."""


def same(first: object, second: object) -> bool:
    """Whether two structures are equal, tensors bit for bit; NaN is equal to NaN."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first.nan_to_num(), second.nan_to_num())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(same, first, second))
    return first is second or bool(first == second)


def shown_batch(batch: object, *, sizes: bool) -> str:
    """The tensors of a batch: type and shape of one example. sizes: all batches have the same ones."""
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {shown_batch(part, sizes=sizes)}" for name, part in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return f"({', '.join(shown_batch(part, sizes=sizes) for part in batch)})"
    if isinstance(batch, Tensor):
        shape = ", ".join(str(length) if sizes else "*" for length in batch.shape[1:])
        return f"{str(batch.dtype).removeprefix('torch.')} [{shape}]"
    return type(batch).__name__


def class_counts(data: Data) -> dict[int, int] | None:
    """How many of the first examples each class number has; None for data without one for each example.

    Class numbers are the targets of a pair (inputs, targets), or a dict's "labels", as in libraries of Hugging Face.
    """
    if isinstance(data, Batched):
        return None
    counts: Counter[int] = Counter()
    for batch in batches(data[:_COUNTED], _COUNTED, seed=0, epochs=1):
        labels = batch[1] if is_pair(batch) else batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1:
            return None
        counts.update(labels.tolist())
    return dict(counts)
