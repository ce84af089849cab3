"""A run's rounds as spans, each from its first draw, or from the restart that found it under way, to its commit."""

from __future__ import annotations

from fl_server.round_state import Phase, RoundState
from protos.traces import RoundSpan, Traces


class RoundTrace:
    """The span of the round under way, if there is one."""

    def __init__(self, traces: Traces, run_id: str) -> None:
        self._traces, self._run_id = traces, run_id
        self._span: RoundSpan | None = None

    def phase_changed(self, before: Phase, state: RoundState) -> None:
        """The run is in another phase."""
        if before is Phase.COMMITTING:
            self._end("committed")
        if state.phase is Phase.ENDED:
            self._end("abandoned")
        elif state.goal and state.phase is not Phase.EVALUATING:
            self._of(state).phase(state.phase.value)

    def parent_for(self, state: RoundState) -> str:
        """What an assignment of the round carries, so that the calls made for it are part of the trace."""
        return self._of(state).traceparent

    def close(self) -> None:
        """The coordinator leaves; what becomes of the round is another trace."""
        self._end("left")

    def _of(self, state: RoundState) -> RoundSpan:
        if self._span is None:
            self._span = self._traces.round(self._run_id, state.round)
        return self._span

    def _end(self, outcome: str) -> None:
        if self._span is not None:
            self._span.end(outcome)
            self._span = None
