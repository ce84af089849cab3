"""The rules, each a function of the policy and of what is requested. Nothing is fetched or run to decide.

A request is made of an assignment, or of a run's file. A run's file leaves some of it open: None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from fl_client.policy.config import DayRules, Policy, WorkRules


@dataclass(frozen=True, slots=True)
class OrderedWork:
    """The amount of local training. None: it depends on the number of local examples, which is unknown."""

    steps: int | None
    epochs: Fraction | None
    """Passes over the local examples."""
    examples: int | None
    """Examples that are read, repeats included."""
    batch: int | None = None
    """Examples of a step, as far as the shard has them."""
    used: int | None = None
    """Different examples."""
    local_steps: int | None = None
    """Steps of the training; 0 for work that does not train."""


UNKNOWN_WORK = OrderedWork(None, None, None)


@dataclass(frozen=True, slots=True)
class Request:
    """What a coordinator requests."""

    kind: Literal["training", "names", "evaluation"]
    """names: training of which only task and method are judged, before the method is made."""
    task: str
    source: str | None = None
    """Digest of the coordinator's code of the task."""
    algorithm: str = ""
    """Empty for an evaluation."""
    work: OrderedWork = UNKNOWN_WORK
    model_bytes: int | None = None
    unknown: str = ""
    """Fields that this version does not know."""
    optimizer: str = "sgd"
    """The optimizer of the local steps."""
    min_clients: int | None = None
    """Accepted updates without which the coordinator commits no round, as it says. 0: it does not say."""
    privacy: str | None = None
    """The unit of differential privacy that the training states; None: none."""
    secure: bool = False
    """Whether the update is masked, so that the coordinator sees only a sum."""


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
    for rule in _RULES[request.kind]:
        yield from rule(policy, request)


def refusal(policy: Policy, request: Request) -> Verdict | None:
    """The first rule that refuses the request. What is left open is refused."""
    return next((verdict for verdict in verdicts(policy, request) if not verdict.accepted), None)


@dataclass(frozen=True, slots=True)
class ShardSize:
    """The local examples."""

    examples: int
    """1 or more."""
    own_batches: int = 0
    """Batches of an epoch if the task makes its batches; they count with their mean size, rounded up."""


def work_of(  # noqa: PLR0913 - epochs and steps are alternatives
    shard: ShardSize,
    batch_size: int,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    passes: bool = False,
    trains: bool = True,
) -> OrderedWork:
    """The work of `epochs` or `steps` of training, both 1 or more, and of a full gradient; see count_steps of fl_tasks.

    passes: whether the exchange has a gradient over the whole shard, which counts as an epoch. trains: whether it
    trains. A method that takes two gradients of one batch (Mime, SAM) reads its examples once.
    """
    examples = shard.examples
    per_epoch = shard.own_batches or -(-examples // batch_size)
    batch = min(-(-examples // shard.own_batches) if shard.own_batches else batch_size, examples)
    count = (epochs or 0) * per_epoch if steps is None else steps
    count = count if trains else 0
    whole, rest = divmod(count, per_epoch)
    read = whole * examples + min(rest * batch, examples)
    first = per_epoch if passes else 0
    return OrderedWork(
        first + count,
        Fraction(first + count, per_epoch),
        read + (examples if passes else 0),
        batch,
        examples if passes else min(read, examples),
        count,
    )


def day_verdicts(policy: Policy, work: OrderedWork) -> Iterator[Verdict]:
    """Whether one assignment fits an unused day."""
    return _at_most_all("day", policy.day, work, ("steps", "examples"))


def _tasks(policy: Policy, request: Request) -> Iterator[Verdict]:
    name, source = request.task, request.source
    yield from _listed("tasks.allow", name, policy.tasks.allow)
    if (pinned := policy.tasks.fingerprints.get(name)) is None:
        return
    if source is None:
        text = "the coordinator's code of the task must be one of tasks.fingerprints; a run's file does not have it"
    elif source in pinned:
        text = f"{source} is in tasks.fingerprints"
    else:
        text = f"the code of {name!r}, {source[:80]!r}, is not in tasks.fingerprints"
    yield Verdict("tasks", None if source is None else source in pinned, text)


def _algorithms(policy: Policy, request: Request) -> Iterator[Verdict]:
    yield from _listed("algorithms.allow", request.algorithm, policy.algorithms.allow)
    yield from _listed("algorithms.optimizers", request.optimizer, policy.algorithms.optimizers)


def _listed(key: str, name: str, allowed: Collection[str] | None) -> Iterator[Verdict]:
    if allowed is not None:
        inside = name in allowed
        yield Verdict(key.partition(".")[0], inside, f"{name[:64]!r} is {'' if inside else 'not '}in {key}")


def _amounts(policy: Policy, request: Request) -> Iterator[Verdict]:
    return _at_most_all("work", policy.work, request.work, ("epochs", "steps"))


def _floors(policy: Policy, request: Request) -> Iterator[Verdict]:
    work, rules = request.work, policy.work
    yield from _at_least(_CLIENTS, rules.min_clients, request.min_clients)
    yield from _at_least("min_examples", rules.min_examples, work.used)
    if work.local_steps != 0:
        yield from _at_least("min_batch_size", rules.min_batch_size, work.batch)
        yield from _at_least("min_steps", rules.min_steps, work.local_steps)


_CLIENTS = "min_clients"


def _at_least(key: str, floor: int, got: int | None) -> Iterator[Verdict]:
    if floor == 1:
        return
    if got is None:
        of = " without round.min_accepted does not decide it, but the coordinator's own rule" if key == _CLIENTS else ""
        text = f"work.{key} is {floor}; a run's file{of or ' does not decide it'}"
        yield Verdict("work", accepted=None, text=text)
        return
    came = "the coordinator states none" if key == _CLIENTS and not got else f"the assignment has {got}"
    yield Verdict("work", got >= floor, f"work.{key} is {floor}, and {came}")


def _model(policy: Policy, request: Request) -> Iterator[Verdict]:
    if (limit := policy.work.max_model_bytes) is not None:
        yield _at_most("work.max_model_bytes", limit, request.model_bytes)


def _at_most_all(
    table: str, rules: WorkRules | DayRules, work: OrderedWork, names: Collection[str]
) -> Iterator[Verdict]:
    for name in names:
        if (limit := getattr(rules, f"max_{name}")) is not None:
            yield _at_most(f"{table}.max_{name}", limit, getattr(work, name))


def _at_most(key: str, limit: int, got: Fraction | int | None) -> Verdict:
    rule = key.partition(".")[0]
    if got is None:
        return Verdict(rule, accepted=None, text=f"{key} is {limit}; a run's file does not decide it")
    accepted = got <= limit
    shown = f"{float(got):g}" if isinstance(got, Fraction) else str(got)
    return Verdict(rule, accepted, f"{key} is {limit}, and the assignment has {shown}")


def _privacy(policy: Policy, request: Request) -> Iterator[Verdict]:
    """Whether a run is private at all. The device's account applies the site's least, and keeps its limit."""
    wanted = policy.privacy.wanted
    if not wanted:
        return
    if request.privacy is None:
        yield Verdict("privacy", accepted=False, text=f"{wanted}, and the run states no differential privacy")
        return
    unit = policy.privacy.unit
    accepted = unit in {None, request.privacy}
    yield Verdict("privacy", accepted, f"{wanted}, and the run states privacy for each {request.privacy[:40]}")


def _secure(policy: Policy, request: Request) -> Iterator[Verdict]:
    """Whether the update enters a sum under masks. Its floors are checked with its terms."""
    if policy.secure_aggregation.require:
        text = "secure_aggregation.require is true, and the coordinator would " + (
            "see a sum only" if request.secure else "see this device's update alone"
        )
        yield Verdict("secure_aggregation", request.secure, text)


def _evaluations(policy: Policy, request: Request) -> Iterator[Verdict]:
    del request
    if not policy.share.evaluations:
        yield Verdict("share", accepted=False, text="share.evaluations is false: no result of an evaluation leaves")


def _unknown(policy: Policy, request: Request) -> Iterator[Verdict]:
    if request.unknown and not policy.allow_unknown_demands:
        text = f"the assignment has fields that this version does not know: {request.unknown}"
        yield Verdict("unknown_demands", accepted=False, text=text)


_Rule = Callable[[Policy, Request], Iterator[Verdict]]
_RULES: Mapping[str, tuple[_Rule, ...]] = MappingProxyType(
    {
        "names": (_unknown, _tasks, _algorithms),
        "training": (_unknown, _tasks, _algorithms, _amounts, _floors, _model, _privacy, _secure),
        "evaluation": (_unknown, _evaluations, _tasks, _model),
    }
)
