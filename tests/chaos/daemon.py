"""`python -m tests.chaos.daemon --config FILE`: the real daemon, with a shorter longest wait between retries."""

from __future__ import annotations

import functools
import sys

from fl_client import app
from fl_client.__main__ import main
from fl_client.connection.link import RetryDelays

LONGEST_S = 1.0
"""Real daemons wait longer to spare the network. Here the coordinator restarts hundreds of times."""

if __name__ == "__main__":
    # A partial replaces the class.
    app.Instruments = functools.partial(  # type: ignore[misc, assignment]
        app.Instruments, delays=RetryDelays(longest=LONGEST_S)
    )
    sys.exit(main())
