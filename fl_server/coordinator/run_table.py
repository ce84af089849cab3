"""The table of a coordinator's runs, which its parts share."""

from __future__ import annotations

from fl_server.coordinator.not_loaded import NotLoadedRuns
from fl_server.errors import NoSuchRun
from fl_server.runs.run import Run


class RunTable:
    """Every run of the ledger that is not deleted, by id. Used on the event loop."""

    def __init__(self) -> None:
        self.loaded: dict[str, Run] = {}
        self.not_loaded = NotLoadedRuns()

    def add(self, run: Run) -> None:
        """Add a run in its place: the table is in the order of creation."""
        self.not_loaded.remove(run.id)
        self.loaded[run.id] = run
        self.loaded = dict(sorted(self.loaded.items(), key=lambda each: (each[1].record.created_at, each[0])))

    def is_over(self, run_id: str) -> bool:
        """Whether no client works for the run any more: it has ended, or is unknown to this coordinator."""
        run = self.loaded.get(run_id)
        return run_id not in self.not_loaded and (run is None or run.ended)

    def require(self, run: Run) -> None:
        """Raises NoSuchRun if the run was deleted while the caller waited for its turn."""
        if self.loaded.get(run.id) is not run:
            raise NoSuchRun(run.id)
