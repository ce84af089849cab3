"""The numbers of the page about clients."""

from __future__ import annotations

import re
from math import ceil, comb

from tests.docs.pages import ROOT

CLIENTS, SLOW, GOAL = 100, 30, 10


def slow_share(factor: float) -> float:
    """E[max(0, goal - fast drawn)] / goal, with the slow ones among the drawn distributed hypergeometrically."""
    drawn = ceil(factor * GOAL)
    ways = ((comb(SLOW, slow) * comb(CLIENTS - SLOW, drawn - slow), slow) for slow in range(drawn + 1))
    counted = sum(count * max(0, GOAL - (drawn - slow)) for count, slow in ways)
    return counted / comb(CLIENTS, drawn) / GOAL


def test_the_share_of_slow_clients_is_that_of_the_page() -> None:
    """A round that closes with its first arrivals counts slow clients less often than their number."""
    page = (ROOT / "docs/operation/clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([0-9.]+) \| ([0-9.]+) % \|$", page, re.MULTILINE)
    assert len(rows) == 4
    assert [(factor, f"{100 * slow_share(float(factor)):.1f}") for factor, _ in rows] == rows
