"""Draws the dashboards as an operator sees them: `python -m docs.source.dashboards`.

Without --prometheus it starts a coordinator, eight daemons and a Prometheus on this machine, causes some faults, and
draws the dashboards after some minutes. With --prometheus it draws the data of that Prometheus.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from docs.source.dashboards import federation
from docs.source.dashboards.asking import View
from docs.source.dashboards.page import draw
from k8s.dashboards.files import committed
from k8s.dashboards.frame import OVERVIEW, RUN_DETAIL
from tests.monitoring.prometheus import Prometheus

IMAGES = Path(__file__).parents[2] / "images"
_POINTS = 300
_HONEST = "Drawn by docs/source/dashboards from this dashboard's own queries, asked of a real Prometheus"


def main() -> None:
    """Parse the command line, find or start a Prometheus, draw."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with _watched(arguments) as (prometheus, start, end, what):
        for uid, name, run in ((OVERVIEW, "federation-overview", ".+"), (RUN_DETAIL, "run-detail", arguments.run)):
            variables = {"datasource": "Prometheus", "run": run, "window": arguments.window}
            step_s = max(1.0, (end - start) / _POINTS)
            view = View(prometheus, end - step_s * int((end - start) / step_s), end, step_s, variables)
            draw(committed()[uid], view, arguments.out / f"{name}.png", f"{_HONEST}{what}. No screenshot of Grafana.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m docs.source.dashboards", description=__doc__)
    parser.add_argument("--prometheus", metavar="URL", help="one that runs already, as http://127.0.0.1:9090")
    parser.add_argument("--run", default=federation.RUN, help="the run that Run detail shows")
    parser.add_argument("--window", default="30s", help="how far back rates and shares look")
    parser.add_argument("--minutes", type=float, default=15.0, help="of the past to draw, with --prometheus")
    parser.add_argument("--end", type=float, help="unix time at which they end; now without, with --prometheus")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    return parser.parse_args()


@contextmanager
def _watched(arguments: argparse.Namespace) -> Iterator[tuple[Prometheus, float, float, str]]:
    """Yield a Prometheus, the start and end of its data, and a description of its targets."""
    if arguments.prometheus:
        end = arguments.end or time.time()
        yield Prometheus(arguments.prometheus.removeprefix("http://")), end - 60 * arguments.minutes, end, ""
        return
    with tempfile.TemporaryDirectory() as folder, federation.federation(Path(folder)) as fleet:
        federation.play(fleet, lambda line: print(line, file=sys.stderr, flush=True))
        what = f" that watched a real coordinator and {len(fleet.daemons)} real daemons, with faults on purpose"
        yield fleet.prometheus, fleet.began, time.time(), what


if __name__ == "__main__":
    main()
