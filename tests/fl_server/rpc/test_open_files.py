"""The limit of open files, which is the limit of clients."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from structlog.testing import capture_logs

from fl_server.rpc.ports import allow_open_files, warn_of_few_files
from fl_server.settings.sections import ConnectionsConfig, LimitsConfig


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A process with a soft limit of 1024 and a hard limit of 4096 open files; returns the limits that it sets."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: asked.append(limit))
    return asked


def logged(limits: LimitsConfig) -> list[Any]:
    """What the start of a process with these limits logs."""
    with capture_logs() as logs:
        warn_of_few_files(limits, allow_open_files(limits.max_clients, ConnectionsConfig()))
    return logs


def test_the_limit_is_raised_to_the_hard_limit(limits: list[tuple[int, int]]) -> None:
    """Without a log line if that is enough."""
    assert logged(LimitsConfig(max_clients=2000)) == []
    assert limits == [(4096, 4096)]


@pytest.mark.parametrize(
    ("given", "level"),
    [pytest.param({}, "info", id="default"), pytest.param({"max_clients": 20_000}, "warning", id="set")],
)
def test_a_limit_that_is_too_low_is_logged(limits: list[tuple[int, int]], given: dict[str, Any], level: str) -> None:
    """With the numbers and the remedy; as a warning only if the settings name the number of clients."""
    (entry,) = logged(LimitsConfig(**given))
    shown = {name: entry[name] for name in ("event", "log_level", "limit", "max_clients")}
    assert shown == {"event": "few_open_files", "log_level": level, "limit": 4096, "max_clients": 20_000}
    assert "LimitNOFILE" in entry["todo"]


def test_no_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unlimited number of open files causes no log line."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert logged(LimitsConfig(max_clients=20_000)) == []
