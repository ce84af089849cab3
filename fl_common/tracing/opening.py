"""Opens the traces of a process. Tracing is off, and imports nothing, unless OpenTelemetry's variables enable it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fl_common.extras import install_hint
from fl_common.settings import SettingsError
from fl_common.tracing.traces import UNTRACED, Traces

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def open_traces(service: str, environment: Mapping[str, str] = os.environ) -> Traces:
    """The traces of this process; UNTRACED unless an endpoint is configured.

    Args:
        service: name of the service; OTEL_SERVICE_NAME overrides it.
        environment: OpenTelemetry's variables.

    Raises:
        SettingsError: traces are configured, and the packages for them are not installed.
    """
    wanted = any(environment.get(name) for name in _ENDPOINTS)
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
    if not wanted or any(environment.get(name, "").lower() == value for name, value in off.items()):
        return UNTRACED
    try:
        from fl_common.tracing.otel import OtelTraces  # noqa: PLC0415 - its packages are optional
    except ImportError as error:
        raise SettingsError(
            f"{_ENDPOINTS[0]} asks for traces, and {error.name} is not installed: {install_hint('otel')}, or unset it"
        ) from error
    return OtelTraces(service)
