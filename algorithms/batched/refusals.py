"""What cannot be done in lockstep, as one error, and the check of a client's work."""

from __future__ import annotations

from algorithms.base import LocalRule, LocalSettings
from algorithms.client import LocalData, Work
from algorithms.parameters import AlgorithmError


class NotBatched(AlgorithmError):
    """The work is possible only for one client after the other."""

    def __init__(self, what: str) -> None:
        super().__init__(f"clients in lockstep: {what}; use --engine sequential")


def check_work(data: LocalData, work: Work) -> None:
    """Raises NotBatched for work that clients cannot do together, and ValueError without a number of steps."""
    if data.loop is not None:
        raise NotBatched("expected the usual local steps, got a task with a training loop of its own")
    if work.personal:
        raise NotBatched("expected a model without personal parameters, got " + ", ".join(sorted(work.personal)[:5]))
    check_settings(work.settings)
    if work.algorithm.exchanges[work.exchange].trains and data.steps < 1:
        raise ValueError(f"expected the number of each client's steps, 1 or more, got {data.steps}")


def check_settings(settings: LocalSettings) -> None:
    """Raises NotBatched for settings that clients in lockstep do not have."""
    if settings.micro_batch_size:
        raise NotBatched(f"expected whole batches, got micro_batch_size = {settings.micro_batch_size}")
    if settings.scaled_loss:
        raise NotBatched("expected precision = float32 or bfloat16, got float16, whose loss scale is of one client")


def check_rules(rules: list[LocalRule]) -> None:
    """Raises NotBatched unless all clients' rules have the same terms. Factors and tensors may differ."""
    shapes = {
        (rule.gradient, rule.anchored, *(it is None for it in (rule.u, rule.v, rule.ascent, rule.optimizer)))
        for rule in rules
    }
    if len(shapes) > 1:
        raise NotBatched("expected local rules with the same terms for all clients, got different ones")
