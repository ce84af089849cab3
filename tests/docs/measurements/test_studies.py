"""What docs/source/studies.py computes for docs/measurements/papers.md."""

from __future__ import annotations

import pytest

from docs.source import studies


def test_the_page_has_the_numbers_of_the_runs() -> None:
    """Run `python -m docs.source.studies` after new runs of a study."""
    page = studies.PAGE.read_text(encoding="utf-8")
    assert studies.updated(page) == page


def test_oscillation_is_the_deviation_of_late_differences() -> None:
    """Of nine evaluations the last three count: their differences are 3 and -1. A steady climb does not oscillate."""
    assert studies.oscillation([0, 50, 10, 70, 20, 60, 40, 43, 42]) == pytest.approx(8**0.5)
    assert studies.oscillation([0, 9, 1, 2, 3, 4, 5, 6, 7]) == 0
