"""`python -m tests.chaos.server --config FILE`: the coordinator, which kills itself at the ordered point."""

from __future__ import annotations

import sys
from pathlib import Path

from fl_server.__main__ import main
from tests.chaos.points import KillPoints, order_path

if __name__ == "__main__":
    KillPoints(order_path(Path(sys.argv[-1]))).install()
    sys.exit(main())
