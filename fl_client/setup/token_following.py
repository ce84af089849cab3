"""`fl-client init --follow-token`: a device that was revoked comes back when its token file has a new token.

It is for a container beside the daemon's: the token stays out of the process that runs tasks' code, and the daemon uses
the new certificate without a restart. An unchanged file costs the coordinator nothing.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

from fl_client.errors import TransportError, UsageError
from fl_client.setup.enrolling import EnrollFlags, Target, enroll, refusal_of, valid_name

CHECK_S = 5.0
"""Between two looks at the file."""
LONGEST_S = 600.0
"""Between two tries of a token that could not be used; the first ones come after `CHECK_S`, each twice as late."""


def follow_token(flags: EnrollFlags, target: Target) -> None:
    """Use each new token of the file, if there is no valid certificate or it is revoked; until a signal ends this."""
    if flags.token_file is None or str(flags.token_file) == "-":
        raise UsageError("--follow-token needs --token-file FILE, whose later content it uses")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # the first process of a container has no default action
    text, pause, due = "", CHECK_S, -math.inf
    while True:
        if (content := _content(flags.token_file)) != text:
            text, pause, due = content, CHECK_S, -math.inf  # a new token does not wait for the tries of the one before
        if text and time.monotonic() >= due:
            done = _is_done(flags, target)
            due = math.inf if done else time.monotonic() + pause
            pause = min(2 * pause, LONGEST_S)
        time.sleep(CHECK_S)


def _is_done(flags: EnrollFlags, target: Target) -> bool:
    """Whether the token was used, or is not needed. False: it is worth another try."""
    try:
        name = valid_name(target.folder)
        if name is None or refusal_of(target, name) is not None:
            enroll(flags, target)
            target.folder.end_pending()
    except TransportError as error:
        print(f"fl-client: {target.server} does not answer: {error}", file=sys.stderr, flush=True)
        return False
    except UsageError as error:
        print(f"fl-client: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _content(path: Path) -> str:
    """Empty while there is no such file: a Secret may come later."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, ValueError):
        return ""
