"""The processes of a test, which end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fl_ops.simulate.ranks.launch import Launches


@pytest.fixture
def launches() -> Iterator[Launches]:
    """Starts processes."""
    with Launches() as started:
        yield started
