"""Sensors for the tests of gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fl_client.gates.hardware import Hardware


@pytest.fixture
def hardware(tmp_path: Path) -> Hardware:
    """A device without any sensor yet."""
    return Hardware(tmp_path / "sys")
