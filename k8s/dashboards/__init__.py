"""Grafana's dashboards: `python -m k8s.dashboards` writes the deployed JSON.

`overview.toml` and `run_detail.toml` have what they show; the modules give it one style.
"""
