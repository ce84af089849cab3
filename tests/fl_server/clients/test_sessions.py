"""Sessions and streams: one for each client, with pushed messages in order."""

from __future__ import annotations

from typing import Any

import pytest

from fl_server.clients.sessions import MOST_AUTHORITIES, Origin, Sessions, Stream, check_questions, shown_certificate
from fl_server.errors import Fenced, Forbidden, InvalidInput, UnknownSessionError
from fl_server.identity import Identity, caller
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey


def notice(text: str) -> pb.AttendResponse:
    """A message to push."""
    return pb.AttendResponse(notice=pb.Notice(text=text))


async def texts(stream: Stream) -> list[str]:
    """The texts of all messages of an ended stream."""
    return [message.notice.text async for message in stream]


async def test_a_stream_delivers_all_messages_before_its_end() -> None:
    """In order; without an error the stream just ends."""
    stream = Stream()
    for text in "ab":
        stream.push(notice(text))
    stream.end()
    assert await texts(stream) == ["a", "b"]


async def test_an_error_ends_a_stream_after_the_pushed_messages() -> None:
    """No earlier message is lost."""
    stream = Stream()
    stream.push(notice("a"))
    stream.end(Forbidden("a", "b"))
    messages = aiter(stream)
    assert (await anext(messages)).notice.text == "a"
    with pytest.raises(Forbidden):
        await anext(messages)


@pytest.mark.parametrize("instance", ["first", "second"])
async def test_a_newer_session_fences_the_older(instance: str) -> None:
    """The older id becomes invalid; its stream learns whether another daemon registered."""
    sessions = Sessions()
    older, fenced_before = sessions.open("a", Origin("first"))
    older.stream = Stream()
    newer, fenced = sessions.open("a", Origin(instance))
    assert (fenced_before, fenced, len(sessions), sessions.of("a")) == (None, older, 1, newer)
    with pytest.raises(UnknownSessionError):
        sessions.get(older.id)
    with pytest.raises(Fenced) as error:
        await texts(older.stream)
    assert error.value.detail.by_other_instance is (instance == "second")


async def test_messages_are_pushed_only_to_attached_clients() -> None:
    """Before and after its stream a client is not reached, and the caller learns it."""
    sessions = Sessions()
    session, _ = sessions.open("a", Origin("x"))
    assert not sessions.push("a", notice("early"))
    assert not sessions.push("b", notice("unknown"))
    stream = session.stream = Stream()
    assert sessions.push("a", notice("now"))
    sessions.push_all(notice("all"))
    sessions.close("a", Forbidden("a", "b"))
    assert not sessions.push("a", notice("late"))
    with pytest.raises(Forbidden):
        await texts(stream)
    assert (len(sessions), sessions.of("a")) == (0, None)


def test_session_ids_cannot_be_guessed() -> None:
    """Sixteen random bytes each."""
    sessions = Sessions()
    ids = {sessions.open(name, Origin("x"))[0].id for name in "abc"}
    assert (len(ids), {len(each) for each in ids}) == (3, {32})


def attending(*authorities: bytes) -> pb.AttendRequest:
    """A request that names authorities."""
    return pb.AttendRequest(session_id="s" * 32, authorities=authorities)


def test_the_certificate_that_a_client_shows() -> None:
    """That of the call, with the authorities that the request names. In plain text there is none."""
    request = attending(b"\x01" * 32)
    assert shown_certificate(request) is None
    who = Identity("client", "a", ends=20.0, begins=10.0, serial="5", key="k", issuer="ab")
    token = caller.set(who)
    try:
        assert shown_certificate(request) == {
            "serial": "5", "begins": 10.0, "ends": 20.0, "issuer": "ab", "authorities": ["01" * 32],
        }  # fmt: skip
    finally:
        caller.reset(token)


@pytest.mark.parametrize("authorities", [[b"\x01" * 31], [b"\x01" * 32] * (MOST_AUTHORITIES + 1)])
def test_authorities_that_are_no_digests_or_too_many_are_refused(authorities: list[bytes]) -> None:
    """The ledger keeps them."""
    with pytest.raises(InvalidInput, match="authorities: expected at most 12 digests of 32 bytes"):
        shown_certificate(attending(*authorities))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pending": [ExchangeKey(run_id="r")] * 1001}, "pending: expected 1000 at most, got 1001"),
        ({"states": [pb.HeldState(run_id="r")] * 1001}, "states: expected 1000 at most, got 1001"),
    ],
)
def test_too_many_questions_are_refused(asked: dict[str, Any], message: str) -> None:
    """Each is looked up, and answered by an event."""
    with pytest.raises(InvalidInput, match=message):
        check_questions(pb.AttendRequest(**asked))
