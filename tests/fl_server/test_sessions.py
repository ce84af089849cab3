"""Sessions and streams: one for each client, and what is pushed arrives in order."""

from __future__ import annotations

import pytest

from fl_server.errors import Fenced, Forbidden, UnknownSessionError
from fl_server.sessions import Origin, Sessions, Stream
from protos.fl.v1 import coordinator_pb2 as pb


def word(text):
    """Something to push."""
    return pb.AttendResponse(notice=pb.Notice(text=text))


async def heard(stream):
    """What comes out of a stream that was ended."""
    return [message.notice.text async for message in stream]


async def test_a_stream_brings_what_was_pushed_before_its_end():
    """In order; an end without error is an end."""
    stream = Stream()
    for text in "ab":
        stream.push(word(text))
    stream.end()
    assert await heard(stream) == ["a", "b"]


async def test_an_error_ends_a_stream_behind_what_was_pushed():
    """Nothing that came before is lost."""
    stream = Stream()
    stream.push(word("a"))
    stream.end(Forbidden("a", "b"))
    messages = aiter(stream)
    assert (await anext(messages)).notice.text == "a"
    with pytest.raises(Forbidden):
        await anext(messages)


@pytest.mark.parametrize("instance", ["first", "second"])
async def test_a_newer_session_fences_the_older(instance):
    """The older id means nothing any more; its stream is told whether another daemon did that."""
    sessions = Sessions()
    older, nobody = sessions.open("a", Origin("first"))
    older.stream = Stream()
    newer, fenced = sessions.open("a", Origin(instance))
    assert (nobody, fenced, len(sessions), sessions.of("a")) == (None, older, 1, newer)
    with pytest.raises(UnknownSessionError):
        sessions.get(older.id)
    with pytest.raises(Fenced) as error:
        await heard(older.stream)
    assert error.value.detail.by_other_instance is (instance == "second")


async def test_only_who_is_attached_is_pushed_to():
    """Before its stream and after its end a client is not reached, and the caller knows."""
    sessions = Sessions()
    session, _ = sessions.open("a", Origin("x"))
    assert not sessions.push("a", word("early"))
    assert not sessions.push("b", word("nobody"))
    stream = session.stream = Stream()
    assert sessions.push("a", word("now"))
    sessions.push_all(word("all"))
    sessions.close("a", Forbidden("a", "b"))
    assert not sessions.push("a", word("late"))
    with pytest.raises(Forbidden):
        await heard(stream)
    assert (len(sessions), sessions.of("a")) == (0, None)


def test_session_ids_cannot_be_guessed():
    """Sixteen random bytes each."""
    sessions = Sessions()
    ids = {sessions.open(name, Origin("x"))[0].id for name in "abc"}
    assert (len(ids), {len(each) for each in ids}) == (3, {32})
