"""The classes of optimizers by name, and the check of their arguments.

Built in are sgd, adam, adamw, rmsprop, lion and muon. Any class of torch.optim has a name such as torch.optim:NAdam.
Another class, as module:Name, must be given: nothing is imported here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from algorithms.optimizers.lion import Lion
from algorithms.optimizers.spec import OptimizerSpec, OptimizerValue
from algorithms.outside_code import is_interrupt
from algorithms.parameters import AlgorithmError, unknown

BUILT_IN: Mapping[str, type[Optimizer]] = MappingProxyType(
    {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
        "lion": Lion,
        "muon": torch.optim.Muon,
    }
)
"""Names with their classes. muon: for hidden matrices; AdamW makes the steps of all other parameters."""

Known = Mapping[str, type[Optimizer]]
"""Classes of other packages that this machine's own settings list, by module:Name."""
NO_CLASSES: Known = MappingProxyType({})

TORCH = "torch.optim"
REST = "adamw_"
"""Arguments of muon with this prefix are those of AdamW for all other parameters."""
NAMES, RATIO = f"{REST}names", f"{REST}rate_ratio"
"""Further arguments of muon: patterns of the matrices that AdamW gets, and AdamW's share of the learning rate."""
_MUON: Mapping[str, OptimizerValue] = {"weight_decay": 0.0}
"""local.weight_decay is the decay of a run. torch's default of 0.1 would be added to it unasked."""
_MUON_REST: Mapping[str, OptimizerValue] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
_MUON_RATIO = 3e-4 / 0.02
"""The ratio of the rates that Muon's author advises. With adjust_lr_fn = "match_rms_adamw" one rate is for both."""

_OURS = {
    "params": "they are the model's trainable parameters",
    "lr": "local.learning_rate is the learning rate",
    "maximize": "a local step lowers the loss",
    "foreach": "the device chooses how to compute",
    "fused": "the device chooses how to compute",
    "capturable": "the device chooses how to compute",
    "differentiable": "the device chooses how to compute",
}
"""Arguments that a run does not choose, with the reason."""

_UNUSABLE = {
    "Optimizer": "it is the base of all classes",
    "LBFGS": "it evaluates the loss many times in one step",
    "SparseAdam": "it needs sparse gradients",
}


def check_optimizer(spec: OptimizerSpec) -> None:
    """Check a spec as far as this is possible without the code of other packages, which is not imported.

    Raises:
        AlgorithmError: the name or an argument is unknown, a value is refused by the class, or the state cannot be
            averaged.
    """
    if spec == OptimizerSpec():
        return  # An optimizer of torch loads torch's compiler, which takes seconds, and plain SGD needs none.
    if is_outside(spec.name):
        if spec.state == "server":
            raise AlgorithmError(
                f"state: expected fresh or device for {spec.name}, because the server cannot know which of its tensors "
                f"to average; averaged are those of {', '.join(BUILT_IN)}",
                "state",
            )
        _check_chosen(spec)
        return
    make_optimizers(spec, {"matrix": torch.zeros(2, 2), "vector": torch.zeros(2)}, {})
    if spec.state == "server":
        averaged_symbols(spec)


def is_outside(name: str) -> bool:
    """Whether the name is of a class outside of torch and of this software."""
    return ":" in name and name.partition(":")[0] != TORCH


class OptimizedPart(NamedTuple):
    """An optimizer with its part of the parameters."""

    optimizer: Optimizer
    tensors: dict[str, Tensor]
    rate_ratio: float = 1.0
    """Its learning rate, as a share of the step's."""


def make_optimizers(
    spec: OptimizerSpec, y: dict[str, Tensor], known: Known, model: nn.Module | None = None
) -> list[OptimizedPart]:
    """The optimizers of the parameters: one, or for muon one or two.

    Args:
        spec: name and arguments.
        y: the parameters, leaves that need no gradient.
        known: classes of other packages.
        model: the module with these parameters, in which muon finds the hidden matrices. None: all matrices are hidden.

    Raises:
        AlgorithmError: the class is unknown or not listed, or it refuses its arguments.
    """
    kind = _class_of(spec.name, known)
    if kind is not torch.optim.Muon:
        return [OptimizedPart(_made(kind, spec, spec.parameters, y), y)]
    given = dict(spec.parameters)
    patterns, ratio = _patterns(given.pop(NAMES, None)), _ratio(given)
    own = {name: value for name, value in given.items() if not name.startswith(REST)}
    rest = {name.removeprefix(REST): value for name, value in given.items() if name.startswith(REST)}
    hidden = _hidden_matrices(y, model, patterns)
    matrices = {name: tensor for name, tensor in y.items() if name in hidden}
    others = {name: tensor for name, tensor in y.items() if name not in hidden}
    parts = [(kind, {**_MUON, **own}, matrices, 1.0), (torch.optim.AdamW, {**_MUON_REST, **rest}, others, ratio)]
    return [
        OptimizedPart(_made(optimizer, spec, values, part), part, rate)
        for optimizer, values, part, rate in parts
        if part
    ]


def _hidden_matrices(y: Mapping[str, Tensor], model: nn.Module | None, patterns: Sequence[str] | None) -> set[str]:
    """The matrices for Muon: without those of `patterns`, or without patterns all but embeddings and the last matrix.

    The last matrix of a model is the head: that of its classes, or of its vocabulary.
    """
    matrices = [name for name, tensor in y.items() if tensor.dim() == 2]
    if patterns is not None:
        return {name for name in matrices if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    if model is None or not matrices:
        return set(matrices)
    kinds = dict(model.named_modules(remove_duplicate=False))
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {name for name in matrices[:-1] if not isinstance(kinds.get(name.rpartition(".")[0]), tables)}


def _patterns(value: OptimizerValue | None) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise AlgorithmError(
            f'{NAMES}: expected patterns of names with commas between them, as in "head.*, embed*", or "" for none, '
            f"got {value!r}",
            NAMES,
        )
    return [pattern.strip() for pattern in value.split(",") if pattern.strip()]


def _ratio(given: dict[str, OptimizerValue]) -> float:
    """AdamW's share of the learning rate, removed from the arguments."""
    value = given.pop(RATIO, 1.0 if given.get("adjust_lr_fn") == "match_rms_adamw" else _MUON_RATIO)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise AlgorithmError(f"{RATIO}: expected a number over 0, got {value!r}", RATIO)
    return float(value)


def averaged_symbols(spec: OptimizerSpec) -> dict[str, float]:
    """The tensors that the server averages, with the decay of their bias correction; 0 for none.

    Raises AlgorithmError if there are none, or if they have no meaningful average.
    """
    given = spec.parameters
    match spec.name:
        case "adam" | "adamw" | "muon":
            if given.get("amsgrad"):
                raise AlgorithmError("amsgrad: expected false with state = server: a maximum has no average", "amsgrad")
            muon = spec.name == "muon"
            first, second = _betas(
                given.get(f"{REST}betas", _MUON_REST["betas"]) if muon else given.get("betas", (0.9, 0.999))
            )
            return {"exp_avg": first, "exp_avg_sq": second}
        case "rmsprop":
            more = [name for key, name in (("momentum", "momentum_buffer"), ("centered", "grad_avg")) if given.get(key)]
            return dict.fromkeys(["square_avg", *more], 0.0)
        case "lion":
            return {"exp_avg": 0.0}
        case "sgd" if given.get("momentum"):
            return {"momentum_buffer": 0.0}
    raise AlgorithmError(
        f"state: expected fresh or device for {spec.name}; the server averages the states of adam, adamw, rmsprop, "
        "lion, muon, and sgd with momentum",
        "state",
    )


def _betas(value: OptimizerValue) -> tuple[float, float]:
    first, second = value if isinstance(value, tuple) else (0.0, 0.0)
    return float(first), float(second)


def _class_of(name: str, known: Known) -> type[Optimizer]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise AlgorithmError(unknown("optimizer", name, BUILT_IN), "name")
    if module == TORCH:
        if attribute in _UNUSABLE:
            raise AlgorithmError(f"{name} cannot make local steps: {_UNUSABLE[attribute]}", "name")
        kind = getattr(torch.optim, attribute, None)
    elif name in known:
        kind = known[name]
    else:
        raise AlgorithmError(
            f"expected an optimizer of {', '.join(BUILT_IN)}, of torch.optim, or one that this device's settings list "
            f"(optimizers = [...]: {', '.join(known) or 'none'}), got {name!r}",
            "name",
        )
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise AlgorithmError(f"expected a class of torch.optim.Optimizer, got {name!r}", "name")
    return kind


def _made(
    kind: type[Optimizer], spec: OptimizerSpec, values: Mapping[str, OptimizerValue], y: dict[str, Tensor]
) -> Optimizer:
    accepted = _arguments(kind)
    _check_chosen(spec)
    if wrong := [name for name in values if name not in accepted]:
        raise AlgorithmError(unknown(f"parameter of {spec.name}", wrong[0], accepted), wrong[0])
    given: dict[str, Any] = {name: _as_expected(value, accepted[name]) for name, value in values.items()}
    try:
        return kind(list(y.values()), lr=1.0, **given)  # type: ignore[call-arg] # every class but the base has a rate
    except BaseException as error:  # the class refuses a value, in words of its own
        if is_interrupt(error):
            raise
        raise AlgorithmError(f"{spec.name} with {_shown(values)}: {error}") from error


def _check_chosen(spec: OptimizerSpec) -> None:
    """Raises AlgorithmError for an argument that is not the run's to choose."""
    for name in spec.parameters:
        if (why := _OURS.get(name.removeprefix(REST))) is not None:
            raise AlgorithmError(f"{name}: expected no such parameter of an optimizer: {why}", name)


def _arguments(kind: type[Optimizer]) -> dict[str, object]:
    """The arguments that a run may give, with their defaults."""
    signature = inspect.signature(kind)
    return {name: parameter.default for name, parameter in signature.parameters.items() if name not in _OURS}


def _as_expected(value: OptimizerValue, default: object) -> OptimizerValue:
    """The value, a whole number where the default is one: the wire has only one kind of number.

    A default of 0 may stand for any number, so it decides nothing.
    """
    whole = isinstance(default, int) and not isinstance(default, bool) and default != 0
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def _shown(values: Mapping[str, OptimizerValue]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items()) or "its defaults"
