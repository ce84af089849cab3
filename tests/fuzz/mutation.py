"""One input from one seed: a valid message, stream, text or file, with its structure or its bytes changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from google.protobuf.message import Message

from tests.fuzz.messages import mutated
from tests.fuzz.wire import damaged
from tests.fuzz.words import reworded, shuffled_lines

MOST_CHANGES = 4
_LENGTH = 4
"""Bytes of the length before each message of a stream."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The messages of one call, in order. As bytes, each has its length before it."""

    parts: Sequence[Message | bytes]


Seed = Message | Stream | bytes | str
"""A valid input."""


def random_for(seed: int, name: str, number: int) -> Random:
    """The random numbers of one input. An input can so be made again without those before it."""
    return Random(f"{seed}/{name}/{number}")


def input_of(random: Random, seeds: Sequence[Seed]) -> bytes:
    """One of the seeds with 1 to 4 changes."""
    return changed(random, random.choice(seeds))


def changed(random: Random, seed: Seed) -> bytes:
    """The bytes of a seed with 1 to 4 changes; a message's fields are changed in two of three cases."""
    changes = random.randrange(1, MOST_CHANGES + 1)
    if isinstance(seed, bytes):
        return damaged(random, seed, changes)
    draw = random.random()
    if isinstance(seed, str):
        return _changed_text(random, seed, changes, draw)
    if isinstance(seed, Stream):
        return framed(_changed_stream(random, list(seed.parts), changes))
    if draw < 0.65:
        return mutated(random, seed, changes).SerializeToString()
    raw = (mutated(random, seed, changes) if draw < 0.75 else seed).SerializeToString()
    return damaged(random, raw, changes)


def raw_of(seed: Seed) -> bytes:
    """The bytes of an unchanged seed."""
    if isinstance(seed, Message):
        return seed.SerializeToString()
    if isinstance(seed, Stream):
        return framed([raw_of(part) for part in seed.parts])
    return seed.encode() if isinstance(seed, str) else seed


def framed(parts: Sequence[bytes]) -> bytes:
    """The bytes of a stream."""
    return b"".join(len(part).to_bytes(_LENGTH, "big") + part for part in parts)


def parts_of(raw: bytes) -> Iterator[bytes]:
    """The messages of a stream."""
    while len(raw) > _LENGTH:
        end = _LENGTH + int.from_bytes(raw[:_LENGTH], "big")
        yield raw[_LENGTH:end]
        raw = raw[end:]


def _changed_stream(random: Random, parts: list[Message | bytes], changes: int) -> list[bytes]:
    """Messages in another order, twice, left out, from elsewhere, or changed; sometimes none at all."""
    for _ in range(changes):
        if not parts:
            break
        at, draw = random.randrange(len(parts)), random.random()
        if draw < 0.12:
            del parts[at]
        elif draw < 0.24:
            parts.insert(random.randrange(len(parts) + 1), parts[at])
        elif draw < 0.34:
            other = random.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif draw < 0.38:
            del parts[at:]
        elif draw < 0.42:
            parts[at:at] = [parts[at]] * random.choice((2, 20, 200))
        else:
            parts[at] = changed(random, parts[at])
    return [raw_of(part) for part in parts]


def _changed_text(random: Random, seed: str, changes: int, draw: float) -> bytes:
    if draw < 0.75:
        return reworded(random, seed, changes).encode("utf-8", "surrogatepass")
    if draw < 0.85:
        return shuffled_lines(random, seed).encode("utf-8", "surrogatepass")
    return damaged(random, seed.encode(), changes)
