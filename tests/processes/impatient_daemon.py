"""fl-client, which reports a training step that goes on for half a second after its deadline."""

from __future__ import annotations

import sys

from fl_client.assignments import deadline

if __name__ == "__main__":
    from fl_client.__main__ import main

    deadline.CHECK_S, deadline.HANGS_S = 0.1, 0.5
    sys.exit(main())
