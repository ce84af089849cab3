"""The server step over a buffer of updates that began from different versions of the model (FedBuff).

Version v is the model after v server steps. B are the updates of the step from version v, i one of them, v_i the
version that it began from, s_i = w(v - v_i) its weight by staleness (`algorithms.staleness`), p_i the method's own
weight over B. A method's sums become

    Dbar           = sum_i p_i s_i delta_i
    any other sum  = sum_i c_i s_i payload_i / S,      S = sum_i p_i s_i

with c_i the method's coefficient for the rates of version v_i. As in FedBuff, which divides by |B| alone, Dbar is
shorter if updates are stale. Other sums are means of gradients, such as G and cbar, and stay means. The rest of the
server step is the method's own.

Clients of FedCM and its kin (MoFedSAM, QG, MimeLite, MFL) move along a direction U that the server sent, and the server
knows how far: payload_i = learnt_i + k_i U_{v_i} (`algorithms.reference`). By default the sums above hold for them too.
With `stale_direction = "current"` only what the client learnt is used again, and the part along the direction is that
of the current version, with its full weight:

    sum_i c_i s_i learnt_i + (sum_i c'_i k'_i) U_v              c', k': as if all updates were of version v

For FedCM, with r_i = delta_i + eta K_i (1 - alpha) Delta_{v_i}, this is

    x_{v+1}     = x_v + sum_i p_i s_i r_i - eta Kbar (1 - alpha) Delta_v
    Delta_{v+1} = (1 - alpha) Delta_v - sum_i p_i s_i r_i / (eta K_i) / S

so that Delta stays the moving average of the clients' gradients. Without staleness, all coefficients of U are exactly 0
and those of the updates are the method's own: the step has the bits of a synchronous round.

Updates are summed in the order of (client id bytes, version). So the result depends on the set B, not on its order.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation, AISTATS
2022, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Literal, NamedTuple

from algorithms.aggregate import weighted_sums_of_tensors
from algorithms.base import Algorithm, LocalSettings, Payload, RoundInfo, ServerState, Tensors, UpdateInfo
from algorithms.parameters import AlgorithmError
from algorithms.reference import Reference, any_reference, reference_of
from algorithms.staleness import Staleness

MOVEMENT = "Dbar"
"""The sum that moves the model."""

StaleDirection = Literal["current", "sent"]
"""What an old payload has along the direction: its own part, or that of the current version's direction, as above.

With "sent" the memory is no moving average of the clients' gradients alone: old directions count again. It stands rates
that are about twice as high (`benchmarks/stale_momentum.py`). Without staleness both are the same bits.
"""


class Buffered(NamedTuple):
    """One update of a buffer. A client is there at most once for each version."""

    info: UpdateInfo
    version: int
    """v_i."""
    staleness: int
    """v - v_i."""


class Version(NamedTuple):
    """What the clients of one version were told."""

    algorithm: Algorithm
    """With the parameters of its round."""
    info: RoundInfo
    """The facts of the round with the version's number; `cohort_size` is |B|."""

    def scale(self, payload: Payload, steps: int) -> float:
        """k_i: the payload's part along the direction, of a client with so many steps; 0 without one."""
        reference = any_reference(self.algorithm)
        if reference is None or payload not in _ALONG:
            return 0.0
        return _ALONG[payload](reference, self.info, steps)


class BufferedSum(NamedTuple):
    """A sum over a buffer: sum_i coefficients[i] payload_i + sum_v known[v] U_v, in float64, rounded once."""

    payload: Payload
    coefficients: tuple[float, ...]
    """One for each update, in their order."""
    known: Mapping[int, float]
    """Coefficients of the directions by version, as `Reference.tensors`. Those that are 0 are left out."""


def in_order(entries: Sequence[Buffered]) -> list[int]:
    """The numbers of the entries in the order of summation.

    Raises:
        ValueError: none, or two of one client and version.
    """
    if not entries:
        raise ValueError("expected at least one update, got none; a step without updates changes nothing")
    keys = [(entry.info.client_id.encode(), entry.version) for entry in entries]
    if len(set(keys)) < len(keys):
        raise ValueError("expected one update of each client and version, got more")
    return sorted(range(len(keys)), key=keys.__getitem__)


def shares(current: Version, entries: Sequence[Buffered], weights: Sequence[float]) -> tuple[float, ...]:
    """p_i s_i / S, which sum to one: the weights of the model's buffers."""
    p = current.algorithm.weights([entry.info for entry in entries])
    S = _mean_weight(p, weights)
    return tuple(p_i * s_i / S for p_i, s_i in zip(p, weights, strict=True))


def buffered_sums(  # noqa: PLR0913 - a buffer and its versions
    versions: Mapping[int, Version],
    current: int,
    entries: Sequence[Buffered],
    weights: Sequence[float],
    *,
    stale_direction: StaleDirection = "sent",
) -> dict[str, BufferedSum]:
    """The sums for the method's server step, by name.

    Args:
        versions: all versions of the entries, and the current one.
        current: v.
        entries: B, in any order.
        weights: s_i.
        stale_direction: see `StaleDirection`.
    """
    infos, now = [entry.info for entry in entries], versions[current]
    rows = {number: version.algorithm.sums(infos, version.info) for number, version in versions.items()}
    S = _mean_weight(now.algorithm.weights(infos), weights)
    made: dict[str, BufferedSum] = {}
    for name, fresh in rows[current].items():
        divisor = 1.0 if name == MOVEMENT else S
        own = tuple(
            rows[entry.version][name].coefficients[i] * s_i / divisor
            for i, (entry, s_i) in enumerate(zip(entries, weights, strict=True))
        )
        parts: dict[int, list[float]] = {number: [] for number in versions}
        if stale_direction == "current":
            for entry, own_i, fresh_i in zip(entries, own, fresh.coefficients, strict=True):
                steps = entry.info.num_steps
                parts[entry.version].append(-own_i * versions[entry.version].scale(fresh.payload, steps))
                parts[current].append(fresh_i * now.scale(fresh.payload, steps))
        # Exact sums: without staleness the two parts of each update cancel, whatever their order.
        known = {number: fsum(terms) for number, terms in parts.items()}
        made[name] = BufferedSum(fresh.payload, own, {number: e for number, e in known.items() if e})
    return made


def apply_buffer(  # noqa: PLR0913, PLR0917 - a step over a buffer has this many inputs
    versions: Mapping[int, Version],
    current: int,
    state: ServerState,
    updates: Sequence[tuple[Buffered, Mapping[Payload, Tensors]]],
    directions: Mapping[int, Tensors],
    staleness: Staleness,
    *,
    stale_direction: StaleDirection = "sent",
) -> ServerState:
    """The server state of the next version, bit-equal to a coordinator's, from updates in memory.

    Args:
        versions: as for `buffered_sums`.
        current: v.
        state: of version v.
        updates: B with the payloads, in any order.
        directions: what the clients of each version received beside the model; empty without a direction.
        staleness: the rule for s_i.
        stale_direction: see `StaleDirection`.

    Raises:
        AlgorithmError: the method cannot step over a buffer, or a weight is out of range.
        ValueError: no update, two of one client and version, or a fact that is missing.
    """
    algorithm = versions[current].algorithm
    check_buffered(algorithm)
    updates = [updates[number] for number in in_order([entry for entry, _ in updates])]
    entries = [entry for entry, _ in updates]
    weights = staleness.weights(entry.staleness for entry in entries)
    sums: dict[str, Tensors] = {}
    for name, wanted in buffered_sums(versions, current, entries, weights, stale_direction=stale_direction).items():
        blocks = [sent[wanted.payload] for _, sent in updates]
        blocks += [known_of(versions[number], directions[number]) for number in wanted.known]
        [sums[name]] = weighted_sums_of_tensors(blocks, [[*wanted.coefficients, *wanted.known.values()]])
    return algorithm.server_step(state, sums, versions[current].info)


def known_of(version: Version, direction: Tensors) -> Tensors:
    """U of a version, in the dtypes of the direction. direction: as its clients received it; some tensors are enough.

    Raises:
        ValueError: the method has no part along a direction.
    """
    reference = reference_of(version.algorithm, len(version.algorithm.exchanges) - 1, direction)
    if reference is None:
        raise ValueError(f"expected a method with a part along a direction, got {version.algorithm.name}")
    # Exact: the clients computed U in these dtypes.
    return {name: tensor.to(direction[name].dtype) for name, tensor in reference.tensors.items()}


def refusal(algorithm: Algorithm) -> str:
    """Why the method cannot step over a buffer; empty if it can."""
    along, plain = any_reference(algorithm, any_steps=True) is not None, any_reference(algorithm) is not None
    reasons = {
        "its clients keep a state from round to round, which is valid only once the server has counted their last "
        "update; a client of a buffer begins again before that": algorithm.keeps_client_state,
        "a round of it has two exchanges with one cohort, and the clients of a buffer have no round in common": (
            len(algorithm.exchanges) > 1
        ),
        "all clients take part in each of its rounds, with one number of steps drawn for all": bool(algorithm.skipping),
        "the weights in its clients' steps hold for cohorts drawn uniformly, and fast clients are in more buffers": (
            algorithm.objective != "uniform"
        ),
        "the part of an update along an old direction can be exchanged only if local steps are plain SGD, which are "
        "linear in it": along and not plain,
        "its clients compute a payload of their own, whose part along an old direction is unknown": (
            along and bool(algorithm.exchanges[-1].computed)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_buffered(algorithm: Algorithm) -> None:
    """Raises AlgorithmError, with the reason, for a method that cannot step over a buffer."""
    if why := refusal(algorithm):
        raise AlgorithmError(f"{algorithm.name} cannot step over a buffer: {why}")


def _along_delta(reference: Reference, info: RoundInfo, steps: int) -> float:
    return -reference.scale(LocalSettings(info.learning_rate, schedule=info.schedule), steps)


def _along_momentum(reference: Reference, info: RoundInfo, steps: int) -> float:
    """What K steps leave of the momentum that they start with."""
    del info
    return float(reference.gamma**steps)


_ALONG = {"delta": _along_delta, "client_momentum": _along_momentum}
"""Payloads with a part along the direction -> its k_i. A full gradient at x has none."""


def _mean_weight(p: Sequence[float], weights: Sequence[float]) -> float:
    """S = sum p_i s_i, exactly 1 if all s_i are 1."""
    return fsum(p_i * s_i for p_i, s_i in zip(p, weights, strict=True)) / fsum(p)
