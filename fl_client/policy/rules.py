"""The rules, each a function of the policy and of what is requested. Nothing is fetched or run to decide.

A request is made of an assignment, or of a run's file. A run's file leaves some of it open: None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fl_client.policy.config import Policy


@dataclass(frozen=True, slots=True)
class Work:
    """The amount of local training. None: it depends on the number of local examples, which is unknown."""

    steps: int | None
    epochs: Fraction | None
    """Passes over the local examples."""
    examples: int | None
    """Examples trained on, repeats included."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a coordinator requests."""

    kind: Literal["training", "evaluation"]
    task: str
    source: str | None = None
    """Digest of the coordinator's code of the task."""
    algorithm: str = ""
    """Empty for an evaluation."""
    work: Work | None = None
    model_bytes: int | None = None
    unknown: str = ""
    """Fields that this version does not know."""
    optimizer: str = "sgd"
    """Of the local steps."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of one rule on a request."""

    rule: str
    """A table or key of the policy file: one of monitoring.metrics.POLICY_RULES."""
    accepted: bool | None
    """None: the request leaves it open."""
    text: str


def verdicts(policy: Policy, request: Request) -> Iterator[Verdict]:
    """Every rule that applies to the request, in a fixed order."""
    for rule in _TRAINING if request.kind == "training" else _EVALUATION:
        yield from rule(policy, request)


def refusal(policy: Policy, request: Request) -> Verdict | None:
    """The first rule that refuses the request. What is left open is refused."""
    return next((each for each in verdicts(policy, request) if not each.accepted), None)


def work_of(  # noqa: PLR0913 - epochs and steps are alternatives
    examples: int, batch_size: int, *, epochs: int | None = None, steps: int | None = None, own_batches: int = 0
) -> Work:
    """The work of `epochs` or `steps` on a shard of `examples`. All are 1 or more; see tasks.batches.count_steps.

    own_batches: batches of an epoch if the task makes its batches; they count with their mean size, rounded up.
    """
    per_epoch = own_batches or -(-examples // batch_size)
    if own_batches:
        batch_size = -(-examples // own_batches)
    if steps is None:
        passes = epochs or 0
        return Work(passes * per_epoch, Fraction(passes), passes * examples)
    whole, rest = divmod(steps, per_epoch)
    return Work(steps, Fraction(steps, per_epoch), whole * examples + min(rest * batch_size, examples))


def day_verdicts(policy: Policy, work: Work) -> Iterator[Verdict]:
    """Whether one assignment fits an unused day."""
    for name in ("steps", "examples"):
        if (limit := getattr(policy.day, f"max_{name}")) is not None:
            yield _at_most(f"day.max_{name}", limit, getattr(work, name))


def _tasks(policy: Policy, request: Request) -> Iterator[Verdict]:
    allowed, name = policy.tasks.allow, request.task
    if allowed is not None:
        if name not in allowed:
            yield Verdict("tasks", accepted=False, text=f"{name[:64]!r} is not in tasks.allow")
        else:
            yield Verdict("tasks", accepted=True, text=f"{name!r} is in tasks.allow")
    if (pinned := policy.tasks.fingerprints.get(name)) is None:
        return
    if request.source is None:
        text = "the coordinator's code of the task must be one of tasks.fingerprints; a run's file does not have it"
        yield Verdict("tasks", accepted=None, text=text)
    elif request.source in pinned:
        yield Verdict("tasks", accepted=True, text=f"{request.source} is in tasks.fingerprints")
    else:
        text = f"the code of {name!r}, {request.source[:80]!r}, is not in tasks.fingerprints"
        yield Verdict("tasks", accepted=False, text=text)


def _algorithms(policy: Policy, request: Request) -> Iterator[Verdict]:
    allowed, name = policy.algorithms.allow, request.algorithm
    if allowed is not None:
        inside = name in allowed
        text = f"{name[:64]!r} is {'' if inside else 'not '}in algorithms.allow"
        yield Verdict("algorithms", accepted=inside, text=text)
    allowed, name = policy.algorithms.optimizers, request.optimizer
    if allowed is not None:
        inside = name in allowed
        text = f"{name[:64]!r} is {'' if inside else 'not '}in algorithms.optimizers"
        yield Verdict("algorithms", accepted=inside, text=text)


def _amounts(policy: Policy, request: Request) -> Iterator[Verdict]:
    work, rules = request.work, policy.work
    for key, limit, got in (
        ("max_epochs", rules.max_epochs, None if work is None else work.epochs),
        ("max_steps", rules.max_steps, None if work is None else work.steps),
    ):
        if limit is not None:
            yield _at_most(f"work.{key}", limit, got)


def _model(policy: Policy, request: Request) -> Iterator[Verdict]:
    if (limit := policy.work.max_model_bytes) is not None:
        yield _at_most("work.max_model_bytes", limit, request.model_bytes)


def _at_most(key: str, limit: int, got: Fraction | int | None) -> Verdict:
    rule = key.partition(".")[0]
    if got is None:
        return Verdict(rule, accepted=None, text=f"{key} is {limit}; a run's file does not decide it")
    accepted = got <= limit
    shown = f"{float(got):g}" if isinstance(got, Fraction) else str(got)
    return Verdict(rule, accepted, f"{key} is {limit}, and the assignment has {shown}")


def _privacy(policy: Policy, request: Request) -> Iterator[Verdict]:
    del request  # no request can state its privacy yet
    rules = policy.privacy
    if rules.require or rules.max_epsilon is not None:
        wanted = (
            "privacy.require is true" if rules.max_epsilon is None else f"privacy.max_epsilon is {rules.max_epsilon:g}"
        )
        yield Verdict("privacy", accepted=False, text=f"{wanted}, and the run states no differential privacy")


def _evaluations(policy: Policy, request: Request) -> Iterator[Verdict]:
    del request
    if not policy.share.evaluations:
        yield Verdict("share", accepted=False, text="share.evaluations is false: no result of an evaluation leaves")


def _unknown(policy: Policy, request: Request) -> Iterator[Verdict]:
    if request.unknown and not policy.allow_unknown_demands:
        text = f"the assignment has fields that this version does not know: {request.unknown}"
        yield Verdict("unknown_demands", accepted=False, text=text)


_Rule = Callable[[Policy, Request], Iterator[Verdict]]
_TRAINING: tuple[_Rule, ...] = (_unknown, _tasks, _algorithms, _amounts, _model, _privacy)
_EVALUATION: tuple[_Rule, ...] = (_unknown, _evaluations, _tasks, _model)
