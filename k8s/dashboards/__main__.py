"""Writes the dashboards as JSON into the monitoring component: `python -m k8s.dashboards`."""

from __future__ import annotations

from k8s.dashboards.files import texts

if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
