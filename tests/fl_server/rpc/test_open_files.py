"""The limit of open files, which is the limit of clients."""

from __future__ import annotations

import resource

import pytest
from structlog.testing import capture_logs

from fl_server.rpc.ports import allow_open_files
from fl_server.settings.sections import ConnectionsConfig


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A process with a soft limit of 1024 and a hard limit of 4096 open files; returns the limits that it sets."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: asked.append(limit))
    return asked


def test_the_limit_is_raised_to_the_hard_limit(limits: list[tuple[int, int]]) -> None:
    """Without a log line if that is enough."""
    with capture_logs() as logs:
        allow_open_files(2000, ConnectionsConfig())
    assert (limits, logs) == ([(4096, 4096)], [])


def test_a_limit_that_is_too_low_is_logged(limits: list[tuple[int, int]]) -> None:
    """With the numbers and the remedy."""
    with capture_logs() as logs:
        allow_open_files(20_000, ConnectionsConfig())
    assert [(entry["event"], entry["limit"], entry["max_clients"]) for entry in logs] == [
        ("few_open_files", 4096, 20_000)
    ]
    assert "LimitNOFILE" in logs[0]["todo"]


def test_no_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unlimited number of open files causes no log line."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with capture_logs() as logs:
        allow_open_files(20_000, ConnectionsConfig())
    assert logs == []
