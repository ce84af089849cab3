"""An issuer for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fl_server.enrollment.site import Site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """An issuer whose certificates may be renewed for a minute after their end."""
    site = Site(tmp_path, {"expired_grace_s": 60.0})
    yield site
    site.close()
