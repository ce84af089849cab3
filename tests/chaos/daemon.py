"""`python -m tests.chaos.daemon --config FILE`: a daemon as it is, but for how long it waits between tries at most."""

from __future__ import annotations

import functools
import sys

from fl_client import app
from fl_client.__main__ import main
from fl_client.link import Waits

LONGEST_S = 1.0
"""Of some hundred restarts of a coordinator nobody wants to sit through the seconds that spare a real one's net."""

if __name__ == "__main__":
    app.Instruments = functools.partial(app.Instruments, waits=Waits(longest=LONGEST_S))  # type: ignore[misc]
    sys.exit(main())
