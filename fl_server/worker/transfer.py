"""A call to the coordinator for one transfer of a client: reports go up, and its end ends the transfer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from fl_server.errors import NotNow, ServerError
from fl_server.worker.link import AGAIN_S, error_of

T = TypeVar("T")

FINISH_S = 1.0
"""Longest wait for the coordinator's end of a call."""
REPORT_S = 1.0
"""A report is sent after this time, also of few bytes."""


class EarlyAnswer(Exception):
    """The coordinator has ended the transfer, or decided about it, before its end: `answer` says which."""


class CoordinatedTransfer:
    """One call: `async with`. Lives on the event loop."""

    def __init__(self, call: Any, report: Callable[[int], Message]) -> None:
        """report: the message with the bytes that were moved since the last one."""
        self._call, self._report = call, report
        self._most, self._moved, self._reported_at = 1, 0, time.monotonic()
        self._untaken = False
        """Whether the coordinator has not taken the last report yet."""
        self._answers: deque[Any] = deque()
        """What has come and was not asked for yet; an error is the last one."""
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def finish(self) -> None:
        """Let the coordinator end the call, which is decided or complete. `close` ends it otherwise."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=FINISH_S)

    async def close(self) -> None:
        """End the call."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def begin(self, report_bytes: int) -> None:
        """The coordinator agrees. report_bytes: of a report, at the most."""
        self._most = max(1, report_bytes)

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._call.read()
                if answer is grpc.aio.EOF:
                    self._answers.append(await self._end())
                    return
                if answer.HasField("taken"):
                    self._untaken = False
                else:
                    self._answers.append(answer)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self._answers.append(error_of(error))
        except asyncio.CancelledError:
            self._answers.append(_unreachable())
            raise
        finally:
            self._changed.set()

    async def _end(self) -> ServerError:
        """Why the coordinator has ended the call."""
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return NotNow("the coordinator ended the transfer", AGAIN_S, routine=True)
        begun, metadata = await self._call.initial_metadata(), await self._call.trailing_metadata()
        return error_of(grpc.aio.AioRpcError(code, begun, metadata, await self._call.details()))

    async def answer(self) -> Any:
        """The coordinator's next answer that is not about a report. Raises the error that ended the call."""
        while not self._answers:
            await self._change()
        answer = self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return self._answers.popleft()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def check(self) -> None:
        """Raises EarlyAnswer if the transfer is over."""
        if self._answers:
            raise EarlyAnswer

    async def send(self, message: Message) -> None:
        """Send a message. Raises EarlyAnswer if the call has ended."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            while not self._answers:  # `_read` finds out why
                await self._change()
            raise EarlyAnswer from error

    async def moved(self, count: int, *, now: bool = False) -> None:
        """So many bytes more. Reports them when they are many, or late; now: at once. Raises EarlyAnswer.

        Waits until the coordinator has taken the report before, which is how it slows a client down.
        """
        self._moved += count
        late = time.monotonic() >= self._reported_at + REPORT_S
        if not self._moved or not (now or late or self._moved >= self._most):
            return
        while self._untaken:
            self.check()
            await self._change()
        moved, self._moved, self._reported_at, self._untaken = self._moved, 0, time.monotonic(), True
        await self.send(self._report(moved))

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that may wait long for the client. Raises EarlyAnswer as soon as the transfer is over."""
        working, over = asyncio.create_task(work), asyncio.create_task(self._over())
        try:
            await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise EarlyAnswer
        finally:
            working.cancel()
            over.cancel()
            await asyncio.gather(working, over, return_exceptions=True)

    async def _over(self) -> None:
        while not self._answers:
            await self._change()


def _unreachable() -> ServerError:
    return NotNow("this worker cannot reach the coordinator", AGAIN_S, routine=True)
