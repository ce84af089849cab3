"""`python -m tests.chaos.server --config FILE`: the coordinator, which kills itself at the ordered point.

With CHAOS_MANY_WAITING in the environment it writes verdicts together as soon as so many updates wait.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fl_server.__main__ import main
from fl_server.run import submissions
from tests.chaos.points import KillPoints, order_path

if __name__ == "__main__":
    submissions.MANY_WAITING = int(os.environ.get("CHAOS_MANY_WAITING", submissions.MANY_WAITING))
    KillPoints(order_path(Path(sys.argv[-1]))).install()
    sys.exit(main())
