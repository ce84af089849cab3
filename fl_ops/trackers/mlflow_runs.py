"""Runs of an MLflow tracking server or store. What the server has is not logged again.

A run is found by its tag, its values by name and step. The timestamps are those of the commits.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

# Without this the library reports its use to its makers. An operator may set it to false.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# By default a server that is away is tried for minutes, before the first word. Fewer attempts: a call can be repeated.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
# MLflow refuses a store in plain files unless it is asked for; whoever names such a URI asks for it.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
# stdout is for the command's own output.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow.entities import Metric, Param, RunTag
from mlflow.entities import Run as Entry
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from fl_ops.errors import Refused
from fl_ops.trackers.facts import EndFacts, RoundFacts, RunFacts, TrackedRun

EXPERIMENT = "impetus"
NAME, IDENTITY, STATE, REASON, MODEL = (
    f"impetus.{name}" for name in ("run_id", "identity", "state", "reason", "model_digest")
)
"""The names of our tags."""
_MOST_METRICS, _MOST_SETTINGS = 1_000, 100
"""The most of one batch, as MLflow limits them."""
_MOST_LETTERS = 500
"""The most letters of a parameter's value: the smallest limit of MLflow's stores."""
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_USER = re.compile(r"://[^/\s@]*@")
_ENDED = {"completed": "FINISHED", "stopped": "KILLED", "interrupted": "KILLED", "failed": "FAILED"}
_RUNNING = "RUNNING"

T = TypeVar("T")


class MlflowRun(TrackedRun):
    """One run's entry in MLflow."""

    def __init__(self, uri: str, run: RunFacts) -> None:
        """uri: as in MLFLOW_TRACKING_URI: http://host:5000, sqlite:///file.db or a folder.

        Raises:
            Refused: MLflow cannot be used there.
        """
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._uri, self._run = uri, run
        self._client = self._try(lambda: MlflowClient(tracking_uri=uri))
        self._entry = self._try(self._find_or_make)
        self._written = self._try(self._values_there)
        self._try(self._log_settings)

    @property
    def place(self) -> str:
        """URI and id of the entry."""
        return f"{without_password(self._uri)}, run {self._entry.info.run_id}"

    def write(self, round_: RoundFacts) -> int:
        """Log a round's values that are not there. Returns their number."""
        values = {_FORBIDDEN.sub("_", name): value for name, value in round_.values.items()}
        new = {name: value for name, value in sorted(values.items()) if (name, round_.round) not in self._written}
        time_ms = round(1000 * round_.time)
        metrics = [Metric(name, value, time_ms, round_.round) for name, value in new.items()]
        for batch in _batches(metrics, _MOST_METRICS):
            self._try(partial(self._client.log_batch, self._id, metrics=batch))
        self._written |= {(name, round_.round) for name in new}
        return len(new)

    def finish(self, end: EndFacts) -> None:
        """Log the end of the run."""
        self._try(lambda: self._finish(end))

    def lacks_model(self, name: str, digest: str) -> bool:
        """Whether the file of this model is not there."""
        return bool(self._entry.data.tags.get(f"{MODEL}.{name}") != digest)

    def add_model(self, path: Path, digest: str) -> None:
        """Log a model's file, with the digest of the model."""
        tag = f"{MODEL}.{path.stem}"
        self._try(lambda: self._client.log_artifact(self._id, str(path), "model"))
        # After the file: a tag without its file would keep a later call from logging it.
        self._try(lambda: self._client.set_tag(self._id, tag, digest))

    @property
    def _id(self) -> str:
        return str(self._entry.info.run_id)

    def _find_or_make(self) -> Entry:
        experiment = self._experiment()
        escaped = self._run.identity.replace("'", "")
        runs = self._client.search_runs([experiment], f"tags.`{IDENTITY}` = '{escaped}'", max_results=1)
        if runs:
            entry: Entry = self._client.get_run(runs[0].info.run_id)
            return entry
        began = None if self._run.began is None else round(1000 * self._run.began)
        tags = {NAME: self._run.name, IDENTITY: escaped}
        return self._client.create_run(experiment, start_time=began, tags=tags, run_name=self._run.name)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _values_there(self) -> set[tuple[str, int]]:
        names = self._entry.data.metrics
        return {(name, value.step) for name in names for value in self._client.get_metric_history(self._id, name)}

    def _log_settings(self) -> None:
        """Settings are parameters, which stay as they were first logged. One that has changed is a tag, too."""
        there, settings = self._entry.data.params, self._run.settings
        shown = {_FORBIDDEN.sub("_", name): text[:_MOST_LETTERS] for name, text in settings.items()}
        new = [Param(name, text) for name, text in sorted(shown.items()) if name not in there]
        for batch in _batches(new, _MOST_SETTINGS):
            self._client.log_batch(self._id, params=batch)
        changed = [RunTag(name, text) for name, text in sorted(shown.items()) if there.get(name, text) != text]
        if changed:
            self._client.log_batch(self._id, tags=changed)

    def _finish(self, end: EndFacts) -> None:
        self._client.log_batch(self._id, tags=[RunTag(STATE, end.state), RunTag(REASON, end.reason)])
        self._client.set_terminated(self._id, _ENDED.get(end.state, "KILLED"), round(1000 * end.time))

    def reopen(self) -> None:
        """The run goes on: an entry that had ended is running again."""
        if self._entry.info.status != _RUNNING:
            self._try(lambda: self._client.update_run(self._id, status=_RUNNING))

    def _try(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (MlflowException, OSError, ImportError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            text = f"MLflow at {self._uri} cannot be used: {first}; what was logged stays, and the same command goes on"
            raise Refused(without_password(text)) from error


def without_password(text: str) -> str:
    """The text with addresses such as http://user:password@host as http://host."""
    return _USER.sub("://", text)


def _batches(items: Sequence[T], size: int) -> list[list[T]]:
    rest = iter(items)
    return [batch for _ in range(0, len(items), size) if (batch := list(islice(rest, size)))]
