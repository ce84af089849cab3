"""The places that a command was given: checked before the work, and opened for each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fl_common.extras import install_hint
from fl_ops.errors import UsageError
from fl_ops.trackers.facts import RunFacts, TrackedRun


@dataclass(frozen=True)
class Trackers:
    """The places. None: not wanted."""

    tensorboard: Path | None = None
    mlflow: str | None = None

    def __bool__(self) -> bool:
        return self.tensorboard is not None or self.mlflow is not None

    def check(self) -> None:
        """Raises UsageError, which names the extra, for a library that is not installed: before any work."""
        wanted = {"tensorboard": self.tensorboard is not None, "mlflow": self.mlflow is not None}
        for extra, used in wanted.items():
            if used and find_spec(extra) is None:
                raise UsageError(f"--{extra} needs the package {extra}, which is not installed: {install_hint(extra)}")

    @contextmanager
    def opened(self, run: RunFacts) -> Iterator[Sequence[TrackedRun]]:
        """The run at each place, until the context ends. Raises OpsError."""
        with ExitStack() as stack:
            places: list[TrackedRun] = []
            if self.tensorboard is not None:
                from fl_ops.trackers.tensorboard_files import TensorBoardRun

                places.append(TensorBoardRun(self.tensorboard, run))
                stack.callback(places[-1].close)
            if self.mlflow is not None:
                from fl_ops.trackers.mlflow_runs import MlflowRun

                places.append(MlflowRun(self.mlflow, run))
                stack.callback(places[-1].close)
            yield places
