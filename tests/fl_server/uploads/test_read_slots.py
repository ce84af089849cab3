"""Slots of uploads that read a chunk: a limit on chunks in memory that no slow link feels."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.uploads.stream import ReadSlots
from tests.fl_server.harness import until


async def hold(slots: ReadSlots, *, comes: asyncio.Event, written: asyncio.Event) -> bool:
    """One chunk's turn. Returns whether it still had its slot when the chunk came."""
    async with slots.turn() as turn:
        await comes.wait()
        turn.received()
        held = turn.holds
        await written.wait()
    return held


async def settled() -> None:
    """Let all tasks that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def events(count: int = 2) -> list[asyncio.Event]:
    """Events that are not set."""
    return [asyncio.Event() for _ in range(count)]


async def test_an_upload_waits_while_the_chunk_of_another_is_written() -> None:
    """With one slot the second turn begins when the first chunk is on the disk, however long that takes."""
    slots, (came, written), order = ReadSlots(1, patience_s=0.001), events(), []
    came.set()
    first = asyncio.create_task(hold(slots, comes=came, written=written))
    await until(lambda: not slots.free, "the first has the slot")

    async def second() -> None:
        async with slots.turn():
            order.append("second")

    waiting = asyncio.create_task(second())
    await settled()
    assert not order
    written.set()
    await waiting
    assert (await first, order, slots.free) == (True, ["second"], 1)


async def test_a_slot_is_lent_while_its_holder_waits_for_a_slow_client() -> None:
    """Clients that send nothing hold all slots: another upload gets its turn, and they need no slot when they send."""
    slots, (comes, written) = ReadSlots(2, patience_s=0.001), events()
    silent = [asyncio.create_task(hold(slots, comes=comes, written=written)) for _ in range(2)]
    await until(lambda: not slots.free, "both slots are taken")
    for _ in range(3):
        async with slots.turn() as turn:
            turn.received()
    comes.set()
    written.set()
    assert (await asyncio.gather(*silent)).count(False) >= 1
    assert slots.free == 2


async def test_a_silent_holder_keeps_its_slot_while_nobody_wants_it() -> None:
    """Without another upload nothing is lent."""
    slots, (comes, written) = ReadSlots(1, patience_s=0.0), events()
    silent = asyncio.create_task(hold(slots, comes=comes, written=written))
    await settled()
    comes.set()
    written.set()
    assert await silent
    assert slots.free == 1


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "given"])
async def test_a_turn_that_is_cancelled_leaves_its_slot_to_others(given: bool) -> None:
    """Also when the slot is given in the moment of the cancellation: no slot is lost."""
    slots, (comes, written) = ReadSlots(1, patience_s=60.0), events()
    comes.set()
    first = asyncio.create_task(hold(slots, comes=comes, written=written))
    await until(lambda: not slots.free, "the first has the slot")
    second = asyncio.create_task(hold(slots, comes=comes, written=written))
    await asyncio.sleep(0)
    if given:
        slots.give()  # as the first would; it gives the slot a second time below, so one more is free in the end
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    written.set()
    await first
    assert slots.free == 1 + given


async def test_slots_are_given_in_the_order_of_the_requests() -> None:
    """An upload whose chunks come slowly is not overtaken."""
    slots, (came, written), order = ReadSlots(1, patience_s=60.0), events(), []
    came.set()
    first = asyncio.create_task(hold(slots, comes=came, written=written))
    await until(lambda: not slots.free, "the first has the slot")

    async def turn(number: int) -> None:
        async with slots.turn():
            order.append(number)

    others = []
    for number in range(4):
        others.append(asyncio.create_task(turn(number)))
        await asyncio.sleep(0)
    written.set()
    await asyncio.gather(first, *others)
    assert order == [0, 1, 2, 3]
