"""Tracks a run of a coordinator: what its ledger has at once, and each round that follows until the run ends."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from google.protobuf.json_format import MessageToDict

from fl_common.units import counted
from fl_ops.admin import watching
from fl_ops.admin.client import AdminClient
from fl_ops.errors import NotFound, Unreachable
from fl_ops.exports.download import Parts, receive
from fl_ops.files import Target, file_name
from fl_ops.render.watching import Lost, exit_code
from fl_ops.trackers.facts import EndFacts, RoundFacts, RunFacts, TrackedRun, dotted
from fl_ops.trackers.opening import Trackers
from fl_server.store.checkpoints import AVERAGED, COMMITTED
from fl_web.facts.rounds import EVALUATED, Round, is_of_clients, last_epoch, seconds_of
from fl_web.facts.words import run_state
from protos.fl.v1 import admin_pb2

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_LATE_TRIES, _LATE_WAIT_S = 10, 1.0
T = TypeVar("T")


def run_facts(run: admin_pb2.RunStatus) -> RunFacts:
    """A run's identity and settings. Raises Refused for an id that is no name of a file.

    Two coordinators may use one run id; the time of its creation tells them apart.
    """
    began = seconds_of(run.created)
    spec = MessageToDict(run.spec, preserving_proto_field_name=True)
    return RunFacts(
        file_name("a run's id", run.run_id), f"{run.run_id}, created {run.created.ToJsonString()}", dotted(spec), began
    )


def round_facts(summary: admin_pb2.RoundSummary) -> RoundFacts:
    """The values of a committed round, with the metrics that are known so far."""
    of = Round.of(summary)
    return RoundFacts(of.round, of.committed, {**of.values(), **last_epoch(summary)})


def lacks_evaluation(spec: admin_pb2.EvaluationSpec, summary: admin_pb2.RoundSummary, *, secure: bool = False) -> bool:
    """Whether an evaluation of this round is due and not there.

    secure: with secure aggregation, where what clients measured comes with the round.
    """
    number, metrics = summary.round + 1, summary.metrics
    own = spec.every and number % spec.every == 0 and all(map(is_of_clients, metrics))
    clients = not secure and spec.clients_every and number % spec.clients_every == 0 and EVALUATED not in metrics
    return bool(own or clients)


@dataclass(frozen=True)
class Tracked:
    """What was done. state: of the run at the end; values: those that were new at one place at least."""

    run_id: str
    state: str
    rounds: int
    values: int
    places: tuple[str, ...]


@dataclass
class LedgerTracking:
    """One run of a coordinator, and the places to write it to.

    once: write what the ledger has now, and do not wait for more.
    report: gets lines for people.
    """

    client: AdminClient
    run_id: str
    trackers: Trackers
    once: bool = False
    report: Callable[[str], None] = lambda _: None
    wait: Callable[[float], None] = time.sleep
    _values: int = field(default=0, init=False)
    _places: Sequence[TrackedRun] = field(default=(), init=False)

    def run(self) -> Tracked:
        """Track until the run ends. A coordinator that is away after the start is waited for.

        Raises:
            Unreachable: there is no coordinator at the start.
            OpsError: the coordinator refuses a call, or a place cannot be written to.
        """
        response = self.client.runs.get_run(self.run_id)
        with self.trackers.opened(run_facts(response.run)) as self._places:
            self._write_all(response)
            if not self.once and exit_code(response.run) is None:
                for place in self._places:
                    place.reopen()
                self._follow()
                response = self._last()
                self._write_all(response)
            if exit_code(response.run) is not None:
                self._finish(response.run)
            places = tuple(place.place for place in self._places)
        return Tracked(self.run_id, run_state(response.run.state), len(response.rounds), self._values, places)

    def _follow(self) -> None:
        for event in watching.watch(self.client, self.run_id, self.wait, connected=True):
            if isinstance(event, Lost):
                self.report("connection lost, waiting for the coordinator; Ctrl-C ends the tracking, not the run")
            elif event.event == "snapshot":
                # Rounds may have been committed before the first event, or while there was no connection.
                self._write_all(self._patiently(lambda: self.client.runs.get_run(self.run_id)))
            elif event.HasField("round"):
                self._write(event.round)

    def _last(self) -> admin_pb2.GetRunResponse:
        """The ended run. A run that was stopped gets the evaluation of its last round some moments after its end."""
        for _ in range(_LATE_TRIES):
            response = self._patiently(lambda: self.client.runs.get_run(self.run_id))
            spec = response.run.spec
            secure = spec.HasField("secure_aggregation")
            if not response.rounds or not lacks_evaluation(spec.evaluation, response.rounds[-1], secure=secure):
                break
            self.wait(_LATE_WAIT_S)
        return response

    def _write_all(self, response: admin_pb2.GetRunResponse) -> None:
        for summary in response.rounds:
            self._write(summary)

    def _write(self, summary: admin_pb2.RoundSummary) -> None:
        facts = round_facts(summary)
        new = [place.write(facts) for place in self._places]
        self._values += max(new)
        if any(new):
            self.report(f"{self.run_id}: round {summary.round}, {counted(max(new), 'value')}")

    def _finish(self, run: admin_pb2.RunStatus) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for which, summary in (("latest", run.latest), ("best", run.best)):
                for kind, suffix, digest in (
                    (COMMITTED, "", summary.model_digest), (AVERAGED, "-averaged", summary.averaged_digest),
                ):  # fmt: skip
                    parts = partial(self.client.models.export_model, self.run_id, which, kind)
                    self._add_model(Path(folder) / f"{which}{suffix}.safetensors", digest, parts)
        end = EndFacts(run_state(run.state), run.reason, seconds_of(run.ended))
        for place in self._places:
            place.finish(end)

    def _add_model(self, path: Path, digest: str, parts: Callable[[], Parts]) -> None:
        """Give a model to the places that lack it. path: for its file; digest: empty if the run has none."""
        places = [place for place in self._places if digest and place.lacks_model(path.stem, digest)]
        if not places:
            return
        try:
            self._patiently(lambda: receive(parts(), Target(path, replace=True)))
        except NotFound as error:
            self.report(f"the {path.stem} model is not there any more: {error}")
            return
        for place in places:
            place.add_model(path, digest)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call while there is no connection."""
        seconds = _FIRST_WAIT_S
        while True:
            try:
                return call()
            except Unreachable:
                self.wait(seconds)
                seconds = min(2 * seconds, _LONGEST_WAIT_S)
