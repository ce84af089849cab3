"""The neighbours of each member: all others, or those next to it on a circle in random order (a Harary graph)."""

from __future__ import annotations

import hashlib

from fl_common.secure_aggregation.plan import Plan


def neighbours_of(plan: Plan, seed: bytes) -> tuple[tuple[int, ...], ...]:
    """The neighbours of each member, as places in the order of members, ascending.

    seed: of the members' coins, with which nobody alone can choose the order. It is not used if all are neighbours.
    """
    if plan.full:
        everybody = range(plan.members)
        return tuple(tuple(other for other in everybody if other != member) for member in everybody)
    circle, half = _shuffled(plan.members, seed), plan.neighbours // 2
    made: list[tuple[int, ...]] = [()] * plan.members
    for at, member in enumerate(circle):
        offsets = (*range(-half, 0), *range(1, half + 1))
        made[member] = tuple(sorted(circle[(at + offset) % plan.members] for offset in offsets))
    return tuple(made)


def _shuffled(count: int, seed: bytes) -> list[int]:
    """The order of Fisher and Yates. A number of 256 bits modulo the places left is uniform but for 2^-240."""
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        random = hashlib.sha256(seed + last.to_bytes(4, "big")).digest()
        other = int.from_bytes(random, "big") % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order
