"""`python -m tests.chaos.server --config FILE`: the coordinator, which kills itself where it is ordered to."""

from __future__ import annotations

import sys
from pathlib import Path

from fl_server.__main__ import main
from tests.chaos.points import Deaths, order_beside

if __name__ == "__main__":
    Deaths(order_beside(Path(sys.argv[-1]))).install()
    sys.exit(main())
