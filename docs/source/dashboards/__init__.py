"""Pictures of the dashboards: `python -m docs.source.dashboards` runs a small federation and draws its metrics."""
