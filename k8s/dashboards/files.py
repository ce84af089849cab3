"""The list of dashboards, and their committed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from k8s.dashboards import overview, run_detail

FOLDER = Path(__file__).parents[1] / "components" / "monitoring" / "dashboards"
_BUILDERS = {"federation-overview.json": overview.dashboard, "run-detail.json": run_detail.dashboard}


def texts() -> dict[Path, str]:
    """Return the JSON of each dashboard by its path, with the key order of Grafana's own library."""
    return {FOLDER / name: json.dumps(build(), cls=JSONEncoder, indent=2) + "\n" for name, build in _BUILDERS.items()}


def committed() -> dict[str, Any]:
    """Return the deployed dashboards by uid."""
    models = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    return {model["uid"]: model for model in models}
