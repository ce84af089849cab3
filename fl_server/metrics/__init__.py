"""The coordinator's Prometheus metrics.

Enters here: declarations of metrics, and the narrow view (`RunFigures`) that the run gauges are read from. Only
`fl_common` and `fl_server.rounds` are imported, so that every other package of the server can count.
"""

from fl_server.metrics.coordinator import CERTIFICATE_PORTS, Metrics

__all__ = ["CERTIFICATE_PORTS", "Metrics"]
