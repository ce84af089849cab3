"""Local training: K_i steps with one local rule, for every method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, repeat

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.base import LocalRule, LocalSettings, Memory, Tensors
from algorithms.batches import Batch, Forward, forward_pair
from algorithms.gradients import Batches, BatchGradients, Loss, Processes, clipped, decayed
from algorithms.model_state import personal_views, read_buffers, trainable_views
from algorithms.optimizers.steps import OptimizerSteps
from algorithms.precision import low_dtypes, rounded_like, widened
from algorithms.privacy.dp_sgd import Privacy, PrivateGradients


@dataclass(frozen=True, slots=True)
class LocalResult:
    """The result of one client's training; tensors are on the model's device."""

    delta: Tensors
    """delta_i = y_final - x of the trainable parameters: NEW minus OLD."""
    buffers: Tensors
    """Final values of the model's buffers."""
    steps: int
    """K_i."""
    loss: float | None
    """Mean loss of the steps, each computed before its step. None: a training loop of the task's own has none, and
    private steps measure none."""
    v: Tensors | None = None
    """Final local momentum, if the rule has one."""
    ascent: Tensors = field(default_factory=dict)
    """Final parameters of the rule's input map, if it has one."""
    optimizer: Memory = field(default_factory=dict)
    """Final state of the rule's optimizer, if it has one that is kept."""
    personal: Tensors = field(default_factory=dict)
    """Final values of the personal parameters and buffers."""
    examples: int | None = None
    """n_i, if a training loop of the task's own reported it."""
    epochs: tuple[Mapping[str, float], ...] = ()
    """Means over each epoch, by name: "loss" of the steps. Empty if they were not asked for."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What a client knows beside its batches. Each may be left out."""

    x: Tensors | None = None
    """The current values of the model if the caller has a copy. None: they are copied."""
    on_step: Callable[[int], object] | None = None
    """Called after each step with its number, from 0. Its exceptions end the training."""
    forward: Forward = forward_pair
    """(model, batch on the model's device) -> (output, target). By default, that of a pair of tensors."""
    steps: int = 0
    """K_i, the number of batches. Only a schedule of the learning rate needs it."""
    personal: Collection[str] = ()
    """Names of the model's parameters and buffers that are personal. Their steps have d = g, and they are not in `x`,
    the rule and the delta."""
    epoch_steps: int = 0
    """Steps of an epoch, to measure the mean loss of each. 0: it is not measured."""
    privacy: Privacy | None = None
    """The steps are those of DP-SGD, on Poisson batches, which may have no example. None: plain gradients."""
    processes: Processes | None = None
    """Those that compute each batch together, each a part of it. None: this one alone."""


def train_locally(  # noqa: PLR0913, PLR0917 - five inputs that every training has, and the options
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    rule: LocalRule,
    settings: LocalSettings,
    options: LocalOptions = LocalOptions(),
) -> LocalResult:
    """Train `model` in place from its current values, one step for each batch.

    Args:
        model: any module, of any floating dtype, on any device; it stays in training mode.
        batches: pairs (inputs, targets), or what `options.forward` takes, on any device.
        loss: mean loss of a batch, of shape [], from the output and the target that `options.forward` returns.
        rule: the method's local rule; its tensors may be on another device.
        settings: learning rate, weight decay, clipping.
        options: what may be left out.

    Raises:
        AlgorithmError: the rule transforms the inputs, and a batch is not a pair of tensors; or its optimizer is
            unknown here; or the steps cannot be private.
        ValueError: there is no batch, a batch has no example, or `rule.u` does not have the layout of the trainable
            parameters.
    """
    personal = options.personal
    views = trainable_views(model)
    y = {name: tensor for name, tensor in views.items() if name not in personal}
    gradients: BatchGradients | PrivateGradients
    if options.privacy is None:
        gradients = BatchGradients(model, loss, settings, rule, options.forward, options.processes)
    else:
        gradients = PrivateGradients(model, loss, settings, rule, options.forward, options.privacy)
    rates = rates_of(settings, options.steps)
    step = _Step(gradients, model, views, settings, rule, values_before(y, options.x, rule), personal, rates)
    model.train()
    zero = torch.zeros((), device=next(iter(views.values())).device)
    taken, sums = _take_steps(step, batches, zero, options)
    model.zero_grad()
    v = None if step.v is None else rounded_like(y, step.v)
    # The delta goes into memory that the gradients no longer use.
    return LocalResult(
        step.delta(),
        read_buffers(model, personal),
        taken,
        None if options.privacy is not None else sums[-1].item() / taken,
        v,
        gradients.ascended,
        step.optimizer_state(),
        tree.map(torch.clone, personal_views(model, personal)),
        epochs=epoch_losses([loss.item() for loss in sums] if options.epoch_steps else [], options.epoch_steps, taken),
    )


def _take_steps(step: _Step, batches: Batches, zero: Tensor, options: LocalOptions) -> tuple[int, list[Tensor]]:
    """Make a step of each batch. Returns their number, and the sums of the losses at the start and each epoch's end.

    zero: a sum of no losses. Without steps of an epoch all steps are one.
    """
    total, taken, epoch_steps = zero, 0, options.epoch_steps
    sums = [total]
    for batch in batches:
        # The sum stays on the device: reading it here would wait for the GPU.
        total = total + step.take(batch)
        taken += 1
        if epoch_steps and not taken % epoch_steps:
            sums.append(total)
        if options.on_step is not None:
            options.on_step(taken - 1)
    if not taken:
        raise ValueError("expected at least one batch to train on, got none; does this client hold any examples?")
    if not epoch_steps or taken % epoch_steps:
        sums.append(total)
    return taken, sums


def epoch_losses(values: Sequence[float], epoch_steps: int, steps: int) -> tuple[Mapping[str, float], ...]:
    """The mean loss of each epoch, from the sums at the start and at the epochs' ends; without sums no means.

    The last epoch may have fewer steps. epoch_steps: of `LocalOptions`.
    """
    ends = [min(number * epoch_steps, steps) for number in range(len(values))]
    return tuple(
        {"loss": (values[number] - values[number - 1]) / (ends[number] - ends[number - 1])}
        for number in range(1, len(values))
    )


class _Step:
    """Makes the local steps from x. Intermediate results of a step reuse the memory of the previous one.

    For a model of low precision y is in float32, and the model gets y rounded after each step: a step that is shorter
    than the model's precision would be lost.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - as train_locally
        self,
        gradients: BatchGradients | PrivateGradients,
        model: nn.Module,
        views: Tensors,
        settings: LocalSettings,
        rule: LocalRule,
        x: Tensors,
        personal: Collection[str],
        rates: Iterator[float],
    ) -> None:
        self._gradients, self._rates = gradients, rates
        self._low, self._sent = bool(low_dtypes(views)), x
        self._model = {name: tensor for name, tensor in views.items() if name not in personal}
        self._personal_model = {name: tensor for name, tensor in views.items() if name in personal}
        self._personal = widened(self._personal_model)
        """The parameters with plain steps, as y."""
        x = self._x = widened(x)
        rule = _prepared(rule, x)
        self._settings, self._rule = settings, rule
        self._y, self._u, self._anchor = widened(self._model), rule.u, None
        self._g_out, self._d_out, self._v_out = tree.scratch(x), tree.scratch(x), tree.scratch(x)
        self.v = rule.v
        self._optimizer, self._personal_optimizer = _optimizers(rule, model, self._y, self._personal)
        if rule.gradient.order == "paper" and rule.mu:
            # One constant instead of two: u + mu * (y - x) = mu * (y - (x - u / mu)), and with u = 0 that is exact.
            self._u, self._anchor = None, x if rule.u is None else tree.add(x, rule.u, -1.0 / rule.mu)

    def optimizer_state(self) -> Memory:
        """State of the rule's optimizer, if it is kept."""
        memory = {} if self._optimizer is None else self._optimizer.memory()
        if self._personal_optimizer is None:
            return memory
        own = self._personal_optimizer.memory()
        return {symbol: {**memory.get(symbol, {}), **own.get(symbol, {})} for symbol in {**memory, **own}}

    def delta(self) -> Tensors:
        """y - x, in the model's dtypes."""
        return rounded_like(self._model, tree.subtract(self._y, self._x))

    def take(self, batch: Batch) -> Tensor:
        """Make the step of one mini-batch. Returns the loss before it."""
        loss, g = self._gradients.compute(batch)
        if self._low:
            g = widened(g)
        g_personal = _of(g, self._personal)
        if self._personal:
            g = _of(g, self._y)
        if self._rule.anchored:
            point = {**self._sent, **self._personal_model}
            g = tree.subtract(g, self._gradients.recompute_at(point), self._g_out)
        rate = next(self._rates)
        if self._rule.gradient.order == "feddyn_code":
            d, g_personal = self._clipped_decayed(self._mixed(g), g_personal)
            self._descend(d, rate)
        elif self.v is None and self._optimizer is None:
            self._move(g, rate)
        else:
            self._descend(self._mixed(g), rate)
        if self._personal:
            self._advance_personal(g_personal, rate)
        if self._low:
            tree.copy_(self._model, self._y)
        return loss

    def _advance_personal(self, g: Tensors, rate: float) -> None:
        """One step of the personal parameters without a term of the method's rule, for they have no server."""
        if self._personal_optimizer is None:
            tree.add_(self._personal, g, -rate)
        else:
            self._personal_optimizer.step(g, rate)
        if self._low:
            tree.copy_(self._personal_model, self._personal)

    def _descend(self, d: Tensors, rate: float) -> None:
        """One step of y along d, by the rule's optimizer or momentum if it has one."""
        if self._optimizer is not None:
            self._optimizer.step(d, rate)
            return
        if self.v is not None:
            d = self.v = tree.accumulate(self.v, self._rule.gamma, d, self._v_out)
        tree.add_(self._y, d, -rate)

    def _move(self, g: Tensors, rate: float) -> None:
        """y <- y - eta_l * d, one term at a time, which needs fewer passes. Neutral terms are skipped."""
        rule = self._rule
        if self._anchor is not None:
            tree.lerp_(self._y, self._anchor, rate * rule.mu)
        if self._u is not None:
            tree.add_(self._y, self._u, -rate)
        tree.add_(self._y, g, -rate * rule.a)

    def _mixed(self, g: Tensors) -> Tensors:
        """d = a * g + u + mu * (y - x), without its neutral terms."""
        if self._u is not None:
            return tree.add(self._u, g, self._rule.a, self._d_out)
        if self._rule.a != 1.0:
            g = tree.scale(g, self._rule.a, self._g_out)
        if self._anchor is None:
            return g
        away = tree.subtract(self._y, self._anchor, self._d_out)
        return tree.add(g, away, self._rule.mu, self._d_out)

    def _clipped_decayed(self, d: Tensors, g_personal: Tensors) -> tuple[Tensors, Tensors]:
        """clip(a * g + u - mu * x) + (wd + mu) * y: that program's optimizer adds mu * y together with the decay.

        `_prepared` has added - mu * x to u. The norm is that of shared and personal parts together.
        """
        if g_personal:
            both = clipped({**d, **g_personal}, self._settings)
            d, g_personal = _of(both, d), decayed(_of(both, g_personal), self._personal, self._settings)
        else:
            d = clipped(d, self._settings, self._d_out)
        decay = self._settings.weight_decay + self._rule.mu
        return tree.add(d, self._y, decay, self._d_out) if decay else d, g_personal


def _of(tensors: Tensors, names: Collection[str]) -> Tensors:
    return {name: tensors[name] for name in names}


def _optimizers(
    rule: LocalRule, model: nn.Module, y: Tensors, personal: Tensors
) -> tuple[OptimizerSteps | None, OptimizerSteps | None]:
    """The rule's optimizer for y, and another one for personal parameters, whose state never leaves the device."""
    if rule.optimizer is None:
        return None, None
    own = rule.optimizer.private().begin(personal, model) if personal else None
    return rule.optimizer.begin(y, model), own


def rates_of(settings: LocalSettings, steps: int) -> Iterator[float]:
    """The learning rate of each step. Raises ValueError for a schedule over an unknown number of steps."""
    if settings.schedule.constant:
        return repeat(settings.learning_rate)
    if steps < 1:
        raise ValueError(f"expected the number of steps with a schedule of the learning rate, got {steps}")
    return (settings.learning_rate * settings.schedule.factor(step, steps) for step in count())


def values_before(y: Tensors, kept: Tensors | None, rule: LocalRule) -> Tensors:
    """x, which stays while y moves. For a model that computes at x, it lies in memory allocated by torch."""
    if kept is None or rule.anchored:
        return tree.map(torch.clone, y)
    kept = rounded_like(y, kept)
    tree.check_layout(y, kept, "x")
    return tree.map(_placed_like, y, kept)


def _prepared(rule: LocalRule, x: Tensors) -> LocalRule:
    """The rule with its tensors checked and moved to the parameters' device, once a round."""
    moved: dict[str, Tensors] = {}
    for name, tensors in (("u", rule.u), ("v", rule.v)):
        if tensors is not None:
            tensors = widened(tensors)  # noqa: PLW2901 - only the precision changes
            tree.check_layout(x, tensors, f"direction {name} of the local rule")
            moved[name] = tree.map(_placed_like, x, tensors)
    rule = replace(rule, u=moved.get("u"), v=moved.get("v"))
    if rule.gradient.order == "feddyn_code" and rule.mu:
        rule = replace(rule, u=tree.scale(x, -rule.mu) if rule.u is None else tree.add(rule.u, x, -rule.mu))
    return rule


def _placed_like(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor on the parameter's device and with its strides, which torch's kernels need to be fast."""
    tensor = tensor.to(like.device)
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)
