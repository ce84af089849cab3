"""Numbers for people."""

from __future__ import annotations

import pytest

from fl_common import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (10_188, "9.9 KiB"),
        (10_189, "10 KiB"),
        (45_000_000, "43 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 30, "1.0 GiB"),
        ((1 << 64) - 1, "16 EiB"),
    ],
)
def test_size(count: int, text: str) -> None:
    """Bytes have two significant digits and a suitable unit, also just below the next unit.

    10,188 / 1024 = 9.9492 rounds to 9.9; 10,189 / 1024 = 9.9502 rounds to 10.0, which has its two digits as 10.
    """
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (1.25, "1.25 s"),
        (9.94, "9.94 s"),
        (9.96, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (7_260, "2 h 01 min"),
        (100_000, "1 d 3 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    """Seconds are shown in a suitable unit, also when they round up to the next one."""
    assert units.duration(seconds) == text


def test_plain() -> None:
    """Control characters and line ends become spaces; letters of any script stay."""
    assert units.plain("ä\x1b[31m\nb\u202e") == "ä [31m b "
