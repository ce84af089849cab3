"""The log lines about the clients of a run's rounds. A run whose cohorts are hidden tells only whose work failed."""

from __future__ import annotations

import structlog

log = structlog.get_logger()

_FAILURES = frozenset({"client_failed", "update_refused"})
"""Events that operators need to repair a device: they name client and reason, and neither run nor round."""
_OF_COHORTS = frozenset({"clients", "cohort", "admitted", "accepted", "dropped", "bytes_down", "bytes_up", "first"})
"""Values that tell how many clients, or which ones, take part."""


class CohortLog:
    """Logs for one run."""

    def __init__(self, *, hidden: bool) -> None:
        """hidden: the run's cohorts are (`RunConfig.hides_cohorts`)."""
        self._hidden = hidden

    def info(self, event: str, **values: object) -> None:
        """Log an event that is expected."""
        if (shown := self._shown(event, values)) is not None:
            log.info(event, **shown)

    def warning(self, event: str, **values: object) -> None:
        """Log an event that somebody may have to act on."""
        if (shown := self._shown(event, values)) is not None:
            log.warning(event, **shown)

    def _shown(self, event: str, values: dict[str, object]) -> dict[str, object] | None:
        """The values that may be logged; None if the event may not be."""
        if not self._hidden:
            return values
        if event in _FAILURES:
            return {name: value for name, value in values.items() if name not in {"run", "round"}}
        if "client" in values:
            return None
        return {name: value for name, value in values.items() if name not in _OF_COHORTS}
