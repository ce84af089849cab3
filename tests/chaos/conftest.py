"""A failed test shows what its processes said last."""

from tests.integration.conftest import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]
