"""The limit of open files, which is the limit of clients."""

from __future__ import annotations

import resource

import pytest
from structlog.testing import capture_logs

from fl_server import open_files
from fl_server.config import ConnectionsConfig


@pytest.fixture
def limits(monkeypatch):
    """A process of which 1024 files may be open, and 4096 if it asks; what it asked for."""
    asked = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda _, limit: asked.append(limit))
    return asked


def test_the_limit_is_raised_as_far_as_it_goes(limits):
    """Without a word if that is enough."""
    with capture_logs() as logs:
        open_files.allow_open_files(2000, ConnectionsConfig())
    assert (limits, logs) == ([(4096, 4096)], [])


def test_a_limit_that_is_too_low_is_told(limits):
    """With the numbers, and what to do."""
    with capture_logs() as logs:
        open_files.allow_open_files(20_000, ConnectionsConfig())
    assert [(entry["event"], entry["limit"], entry["max_clients"]) for entry in logs] == [
        ("few_open_files", 4096, 20_000)
    ]
    assert "LimitNOFILE" in logs[0]["todo"]


def test_no_limit_is_enough(monkeypatch):
    """Where any number of files may be open."""
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with capture_logs() as logs:
        open_files.allow_open_files(20_000, ConnectionsConfig())
    assert logs == []
