"""Calls at once: by method, by caller, in all; and a caller whose large request was refused."""

from __future__ import annotations

import pytest

from fl_server.errors import TooMany
from fl_server.rpc import callers as callers_module
from fl_server.rpc.callers import Callers
from fl_server.rpc.requests import BadRequest

ONE, TWO = "/fl.v1.Coordinator/One", "/fl.v1.Coordinator/Two"


def test_a_caller_has_so_many_calls_of_a_method():
    """Another caller and another method have their own; one that ends makes room."""
    callers = Callers(10, 10)
    place = callers.enter("a", ONE, 1)
    with pytest.raises(TooMany, match="at most 1 calls of One at once"):
        callers.enter("a", ONE, 1)
    callers.enter("b", ONE, 1)
    callers.enter("a", TWO, 1)
    place.leave()
    place.leave()  # a second time does nothing
    callers.enter("a", ONE, 1)


def test_a_caller_has_so_many_calls():
    """Over all methods."""
    callers = Callers(2, 10)
    for method in (ONE, TWO):
        callers.enter("a", method, 5)
    with pytest.raises(TooMany, match="at most 2 calls at once are taken of one caller"):
        callers.enter("a", ONE, 5)


def test_a_port_has_so_many_calls():
    """Over all callers, with a wait that a program reads."""
    callers = Callers(5, 2)
    for who in "ab":
        callers.enter(who, ONE, 5)
    with pytest.raises(TooMany, match="2 calls are open, which is the limit of this port") as caught:
        callers.enter("c", ONE, 5)
    assert caught.value.detail.wait.seconds == 1


def test_nothing_is_kept_of_callers_without_calls():
    """Whoever comes and goes leaves no trace."""
    callers = Callers(5, 5)
    for index in range(100):
        callers.enter(str(index), ONE, 5).leave()
    assert not callers._open


def test_who_sent_a_large_request_that_was_refused_is_not_listened_to(monkeypatch):
    """For a while, and alone; a small one costs nothing. So many are remembered at most."""
    monkeypatch.setattr(callers_module, "MOST_RESTING", 2)
    callers = Callers(5, 5)
    for who, size in (("small", 100), ("a", 1 << 20), ("b", 1 << 20), ("c", 1 << 20)):
        with callers.enter(who, ONE, 5) as place, pytest.raises(BadRequest), place.listening():
            raise BadRequest("size", "less", "more", size)
    for who in ("b", "c"):
        with pytest.raises(TooMany, match="the caller's last large request was refused"):
            callers.enter(who, TWO, 5)
    for who in ("small", "a"):
        callers.enter(who, ONE, 5)


def test_a_connection_is_new_once():
    """Of as many as are remembered."""
    callers = Callers(5, 5, known_connections=2)
    assert [callers.is_new(each) for each in "aabcba"] == [True, False, True, True, False, True]
