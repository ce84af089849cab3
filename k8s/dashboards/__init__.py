"""Grafana's dashboards as Python: `python -m k8s.dashboards` writes the deployed JSON."""
