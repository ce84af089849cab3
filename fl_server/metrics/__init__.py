"""What Prometheus is told of the coordinator: declared in `coordinator.py`, of runs in `runs.py` and `per_run.py`."""

from fl_server.metrics.coordinator import Metrics

__all__ = ["Metrics"]
