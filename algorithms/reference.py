"""The part of a client's delta that its server knows: the steps along the direction that the server sent.

With the local rule d = a g + u + mu (y - x) and u constant in the round, K_i steps with the rates eta_k give

    delta_i = r_i - s_i u,      s_i = sum_k eta_k            (FedCM, MoFedSAM, MimeLite, Mime, QG; SCAFFOLD with c)

and with a local momentum that starts at v, v <- gamma v + d,

    delta_i = r_i - s_i v,      s_i = sum_k eta_k gamma^k    (MFL)

A client may send r_i, the reference-free part, in place of delta_i. If u is much of every delta, r_i is shorter, so an
encoding of it has a smaller error. The server subtracts s_i u, so nothing is lost: both use the same operations on
tensors that both have. Terms with mu and clipping of the step change how short r_i is, and not that it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch

from algorithms.base import Algorithm, ClientContext, LocalRule, LocalSettings, Tensors
from algorithms.local import rates_of
from algorithms.precision import widened


@dataclass(frozen=True, slots=True)
class Reference:
    """What all clients of an exchange with one omega_i have in common."""

    tensors: Tensors
    """u or v, in float32 or wider."""
    gamma: float
    """1 for u."""

    def scale(self, settings: LocalSettings, steps: int) -> float:
        """s_i of a client with so many steps, K_i; in units of a learning rate."""
        rates = islice(rates_of(settings, steps), steps)
        return sum(rate * self.gamma**number for number, rate in enumerate(rates, start=1))


def reference_of(
    algorithm: Algorithm, exchange: int, direction: Tensors | None, omega: float = 1.0
) -> Reference | None:
    """The reference of an exchange's deltas; None if the method has no constant part that the server knows.

    direction: as clients receive it. omega: omega_i of the clients. A part of u that is a client's own counts as zero.
    """
    if direction is None or not algorithm.exchanges[exchange].trains:
        return None
    context = ClientContext(direction, algorithm.client_init(direction), omega)
    return _of_rule(algorithm.client_rule(context))


def has_reference(algorithm: Algorithm) -> bool:
    """Whether deltas of the method can have a reference, in some exchange."""
    return any(any_reference(algorithm, exchange) is not None for exchange in range(len(algorithm.exchanges)))


def any_reference(algorithm: Algorithm, exchange: int = -1, *, any_steps: bool = False) -> Reference | None:
    """The reference of an exchange's deltas for some direction; None if the method has no part that the server knows.

    any_steps: as if the local steps were those of plain SGD.
    """
    direction = {"any": torch.ones(1)}
    if not algorithm.exchanges[exchange].trains:
        return None
    rule = algorithm.client_rule(ClientContext(direction, algorithm.client_init(direction)))
    reference = _of_rule(replace(rule, optimizer=None) if any_steps else rule)
    # A client state of zeros gives zeros: then the method has a constant part, which the server does not know.
    known = reference is not None and any(bool(it.any()) for it in reference.tensors.values())
    return reference if known else None


def _of_rule(rule: LocalRule) -> Reference | None:
    if rule.optimizer is not None:  # its steps are not linear in d
        return None
    if rule.v is not None:
        return Reference(widened(rule.v), rule.gamma) if rule.gamma else None
    return None if rule.u is None else Reference(widened(rule.u), 1.0)


class KnownPart(NamedTuple):
    """s_i u of one client."""

    reference: Reference
    scale: float
    """s_i."""

    def removed_from(self, delta: Tensors) -> Tensors:
        """r_i = delta_i + s_i u, in the dtypes of the delta."""
        return {name: values + self._step(name, values) for name, values in delta.items()}

    def added_to(self, rest: Tensors) -> Tensors:
        """delta_i = r_i - s_i u, in the dtypes of r_i."""
        return {name: values - self._step(name, values) for name, values in rest.items()}

    def added_to_part(self, values: torch.Tensor, name: str, start: int) -> torch.Tensor:
        """`added_to` for flat values of one tensor from place `start` on.

        Each entry is computed alone, and no multiplication is fused with the subtraction: cutting changes no bit.
        """
        known = self.reference.tensors[name].flatten()[start : start + len(values)]
        return values - torch.mul(known, self.scale).to(values.dtype)

    def _step(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.reference.tensors[name], self.scale).to(like.dtype)
