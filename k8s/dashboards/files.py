"""The list of dashboards, and their committed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from k8s.dashboards.board import dashboard
from k8s.dashboards.frame import OVERVIEW, RUN_DETAIL

FOLDER = Path(__file__).parents[1] / "components" / "monitoring" / "dashboards"
_SOURCES = Path(__file__).parent


def texts() -> dict[Path, str]:
    """Return the JSON of each dashboard by its path, with the key order of Grafana's own library."""
    boards = {
        "federation-overview.json": dashboard(_SOURCES / "overview.toml", OVERVIEW, all_runs=True),
        "run-detail.json": dashboard(_SOURCES / "run_detail.toml", RUN_DETAIL, all_runs=False),
    }
    return {FOLDER / name: json.dumps(board, cls=JSONEncoder, indent=2) + "\n" for name, board in boards.items()}


def committed() -> dict[str, Any]:
    """Return the deployed dashboards by uid."""
    models = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    return {model["uid"]: model for model in models}
