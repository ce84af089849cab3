"""Tells the owner's program of a released model: a file that is replaced, and a program that is called.

Both are named in the device's own settings, never by the coordinator. The program is called at least once for each
version: again, if this process ends before it has noted that the program has taken it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from typing import Any

from fl_client.settings.config import ReleasesConfig
from fl_client.storage.disk import write_whole
from fl_client.storage.release_folder import Installed, Taken


class NotTaken(Exception):
    """The version could not be fetched, or the owner's program did not take it."""


async def announced(model: str, installed: Installed | None, taken: Taken) -> None:
    """Write the owner's file and call the owner's program, unless it has taken the version. Raises NotTaken, OSError.

    installed: the version in use; None: none is.
    """
    version = 0 if installed is None else installed.version
    if await asyncio.to_thread(taken.folder.announced, model) == version:
        return
    config = taken.config
    await asyncio.to_thread(taken.folder.note_announced, model, None)
    if config.announce is not None:
        content = json.dumps(await asyncio.to_thread(_announcement, taken), indent=1).encode()
        await asyncio.to_thread(write_whole, config.announce, [content], durable=True)
    if config.hook:
        await _call(config, model, installed)
    await asyncio.to_thread(taken.folder.note_announced, model, version)


async def _call(config: ReleasesConfig, model: str, installed: Installed | None) -> None:
    """Call the owner's program. Raises NotTaken if it fails, or takes too long."""
    here = {
        "FL_MODEL": model,
        "FL_VERSION": str(0 if installed is None else installed.version),
        "FL_MODEL_PATH": "" if installed is None else str(installed.path.absolute()),
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *config.hook, env={**os.environ, **here}, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise NotTaken(f"the owner's program cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(config.hook_s):
            code = await process.wait()
    except TimeoutError:
        raise NotTaken(f"the owner's program took longer than {config.hook_s:g} s (releases.hook_s)") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code:
        raise NotTaken(f"the owner's program ended with exit code {code}")


def _announcement(taken: Taken) -> dict[str, Any]:
    """What the owner's file has: each model in use, with its version and where it is."""
    return {
        model: {
            "version": installed.version,
            "path": str(installed.path.absolute()),
            "form": installed.description.form,
            "digest": installed.description.digest,
        }
        for model in taken.folder.in_use()
        if (installed := taken.folder.current(model)) is not None
    }
