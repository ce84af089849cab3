"""Grafana's dashboards as Python: `python -m k8s.dashboards` writes the JSON that is deployed."""
