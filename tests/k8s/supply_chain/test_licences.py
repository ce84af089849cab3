"""The licences of all run-time packages: listed, and compatible with the project's own."""

from __future__ import annotations

import re
from importlib.metadata import distribution

import pytest

from k8s.supply_chain.closure import runtime
from k8s.supply_chain.licences import PAGE, licence, page

COMPATIBLE = {
    *("0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception"),
    *("MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Zlib"),
}
"""Permissive licences, which allow use, change and distribution together with code under Apache-2.0."""
LIBRARIES = {"psycopg", "psycopg-binary"}
"""Under the LGPL, which allows use as a separate, replaceable package."""


@pytest.mark.parametrize("name", sorted(runtime()))
def test_the_licence_is_compatible(name: str) -> None:
    """Each part of the expression is known."""
    if name in LIBRARIES:
        assert licence(distribution(name)) == "LGPL-3.0-only"
        return
    found = re.split(r" (?:AND|OR|WITH) ", licence(distribution(name)))
    assert set(found) <= COMPATIBLE, f"{name}: {', '.join(sorted(set(found) - COMPATIBLE))} is not known as compatible"


def test_the_page_is_current() -> None:
    """docs/development/licences.md is what the packages' metadata have now."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m k8s.supply_chain.licences"
