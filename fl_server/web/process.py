"""Keeps the process that serves the web page running, and ends it with the coordinator.

The process ends when its standard input is closed, so it ends with the coordinator after SIGKILL too. The coordinator
holds the listening socket: a browser that connects while the process is started again waits, and is not refused. While
the process cannot start, a much simpler one (`unavailable.py`) answers between two tries.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between an end of the process and its next start; twice as long each time."""
ANSWERED_PAUSE_S = 2.0
"""Browsers are answered in a pause of this length: the process has ended three times in a row."""
STEADY_S = 60.0
"""The next pause is the first one again when the process has run this long."""
STOP_S = 2.0
"""The process is killed if it has not ended after this time."""
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables of the environment that the process gets. Others may be secrets of the coordinator."""
_UNAVAILABLE = ("-I", str(Path(__file__).with_name("unavailable.py")))


class WebProcess:
    """The supervised process. Lives on the event loop."""

    def __init__(self, settings: bytes, listening: int, count_end: Callable[[], object]) -> None:
        """settings: its first line of input, and a further one after each change. listening: what it serves.

        count_end: counts an end that nobody asked for.
        """
        self._settings, self._listening, self._count_end = settings, listening, count_end
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if none runs."""
        return None if self._process is None else self._process.pid

    def renew(self, settings: bytes) -> None:
        """Give these settings to the running process, and to each that is started later."""
        if settings == self._settings:
            return
        self._settings = settings
        if self._process is not None and (given := self._process.stdin) is not None and not given.is_closing():
            given.write(settings)

    async def run(self) -> None:
        """Keep the process running until this is cancelled."""
        pause = FIRST_PAUSE_S
        while True:
            began, code = time.monotonic(), None
            try:
                code = await self._serve()
            except OSError as error:  # no process, no memory, or no Python any more
                log.error("web_process_not_started", error=str(error))
            pause = FIRST_PAUSE_S if time.monotonic() - began >= STEADY_S else pause
            self._count_end()
            log.warning("web_process_ended", code=code, starts_again_in_s=pause)
            await self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _serve(self) -> int:
        """Start the process and wait for its end. Returns its exit code."""
        async with self._started(["-m", "fl_web"]) as process:
            self._process = process
            log.info("web_process_started", pid=process.pid)
            return await process.wait()

    async def _pause(self, seconds: float) -> None:
        """Wait until the next try. In a long pause browsers are answered that there is no page."""
        if seconds >= ANSWERED_PAUSE_S:
            try:
                async with self._started(_UNAVAILABLE):
                    return await asyncio.sleep(seconds)
            except OSError as error:
                log.error("web_process_not_started", error=str(error))
        return await asyncio.sleep(seconds)

    @asynccontextmanager
    async def _started(self, arguments: Sequence[str]) -> AsyncIterator[Process]:
        """A process of this Python with the settings as its input. It ends with the block."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", *arguments,  # -P: no module comes from the working directory
            stdin=PIPE, pass_fds=(self._listening,), env=_environment(), cwd="/",
            start_new_session=True,  # Ctrl-C in a terminal is for the coordinator, which ends it after the drain
        )  # fmt: skip
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        try:
            with suppress(ConnectionError):
                process.stdin.write(self._settings)
                await process.stdin.drain()
            yield process
        finally:
            process.stdin.close()
            await _end(process)


async def _end(process: Process) -> None:
    """Wait for the end of a process whose input is closed."""
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """Folders of modules are absolute, because the process works in another directory."""
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    folders = filter(None, passed.pop("PYTHONPATH", "").split(os.pathsep))
    return {**passed, "PYTHONPATH": os.pathsep.join(str(Path(folder).absolute()) for folder in folders)}
