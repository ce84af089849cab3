"""Files of others in the tree are the released ones."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import fl_web

UPLOT = Path(fl_web.__file__).parent / "static" / "vendor" / "uplot"


def test_uplot_is_unchanged() -> None:
    """Every file has its hash in SHA256SUMS, and the licence is beside them."""
    lines = [line.split("  ") for line in (UPLOT / "SHA256SUMS").read_text().splitlines()]
    assert {name: digest for digest, name in lines} == {
        path.name: sha256(path.read_bytes()).hexdigest() for path in UPLOT.iterdir() if path.name != "SHA256SUMS"
    }
    assert "MIT License" in (UPLOT / "LICENSE.txt").read_text()
