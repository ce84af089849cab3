"""`python -m tests.chaos.server --config FILE`: the coordinator, which kills itself at the ordered point.

With CHAOS_MANY_WAITING in the environment it writes verdicts together as soon as so many updates wait, and with
CHAOS_PART_BYTES files in an object store have parts of that size.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fl_server.__main__ import main
from fl_server.run import submissions
from fl_server.store.objects import files
from fl_server.worker import upload
from tests.chaos.points import KillPoints, order_path

if __name__ == "__main__":
    submissions.MANY_WAITING = int(os.environ.get("CHAOS_MANY_WAITING", submissions.MANY_WAITING))
    files.PART_BYTES = int(os.environ.get("CHAOS_PART_BYTES", files.PART_BYTES))
    upload.PART_BYTES = files.PART_BYTES  # type: ignore[attr-defined]  # a worker's own name of it
    files.REMOVALS_EVERY_S = float(os.environ.get("CHAOS_REMOVALS_EVERY_S", files.REMOVALS_EVERY_S))
    KillPoints(order_path(Path(sys.argv[-1]))).install()
    sys.exit(main())
