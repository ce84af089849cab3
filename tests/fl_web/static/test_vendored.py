"""Files of others in the tree are the released ones."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

import fl_web

VENDOR = Path(fl_web.__file__).parent / "static" / "vendor"


@pytest.mark.parametrize(("name", "licence"), [("uplot", "MIT License"), ("idiomorph", "Zero-Clause BSD")])
def test_files_of_others_are_unchanged(name: str, licence: str) -> None:
    """Every file has its hash in SHA256SUMS, and the licence is beside them."""
    folder = VENDOR / name
    lines = [line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines()]
    assert {name: digest for digest, name in lines} == {
        path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name != "SHA256SUMS"
    }
    assert licence in (folder / "LICENSE.txt").read_text()


def test_all_files_of_others_are_checked() -> None:
    """The list above has each folder."""
    assert {path.name for path in VENDOR.iterdir()} == {"uplot", "idiomorph"}
