"""Limits of concurrent calls by method, by caller and in total; and a block after a refused large request."""

from __future__ import annotations

import pytest

from fl_server.errors import TooMany
from fl_server.rpc import call_limits as callers_module
from fl_server.rpc.call_limits import BadRequest, CallLimits

ONE, TWO = "/fl.v1.Coordinator/One", "/fl.v1.Coordinator/Two"


def test_the_calls_of_a_method_are_limited_for_each_caller() -> None:
    """Another caller and another method have their own limit; a call that ends allows another."""
    limits = CallLimits(10, 10)
    call = limits.open("a", ONE, 1)
    with pytest.raises(TooMany, match="at most 1 calls of One open"):
        limits.open("a", ONE, 1)
    limits.open("b", ONE, 1)
    limits.open("a", TWO, 1)
    call.close()
    call.close()  # a second time does nothing
    limits.open("a", ONE, 1)


def test_the_calls_of_a_caller_are_limited() -> None:
    """In total over all methods."""
    limits = CallLimits(2, 10)
    for method in (ONE, TWO):
        limits.open("a", method, 5)
    with pytest.raises(TooMany, match="one caller may have at most 2 calls open"):
        limits.open("a", ONE, 5)


def test_the_calls_of_a_port_are_limited() -> None:
    """In total over all callers, with a machine-readable wait."""
    limits = CallLimits(5, 2)
    for who in "ab":
        limits.open(who, ONE, 5)
    with pytest.raises(TooMany, match="2 calls are open, which is the limit of this port") as caught:
        limits.open("c", ONE, 5)
    assert caught.value.detail.wait.seconds == 1


def test_nothing_is_kept_of_callers_without_calls() -> None:
    """A caller is dropped with its last call."""
    limits = CallLimits(5, 5)
    for index in range(100):
        limits.open(str(index), ONE, 5).close()
    assert not limits._open


def test_a_refused_large_request_blocks_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that caller, and for a time; a small request does not. A limited number of callers is remembered."""
    monkeypatch.setattr(callers_module, "MOST_BLOCKED", 2)
    limits = CallLimits(5, 5)
    for who, size in (("small", 100), ("a", 1 << 20), ("b", 1 << 20), ("c", 1 << 20)):
        with limits.open(who, ONE, 5) as call, pytest.raises(BadRequest), call.refusals_block():
            raise BadRequest("size", "less", "more", size)
    for who in ("b", "c"):
        with pytest.raises(TooMany, match="the caller's last large request was refused"):
            limits.open(who, TWO, 5)
    for who in ("small", "a"):
        limits.open(who, ONE, 5)


def test_a_connection_is_new_once() -> None:
    """Among the connections that are remembered."""
    limits = CallLimits(5, 5, known_connections=2)
    assert [limits.is_new(each) for each in "aabcba"] == [True, False, True, True, False, True]
