"""Who may be drawn: who is here, has what the work takes, is willing, works for nobody else and is not quarantined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from fl_server.clients.per_minute import PerMinute
from fl_server.quarantine import Quarantine
from fl_server.registration import fits, is_of
from fl_server.roster import Roster
from fl_server.store.base import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Calls:
    """Who is told, and how often."""

    changed: Callable[[], None]
    """Somebody else may be drawn now."""
    came_back: Callable[[str], None]
    """A client may train again."""
    comebacks: PerMinute
    """How often a client may say that."""


class Workforce:
    """What the clients of one coordinator can be asked to do. Lives on the event loop."""

    def __init__(
        self,
        records: Mapping[str, ClientRecord],
        roster: Roster,
        quarantine: Quarantine,
        calls: Calls,
    ) -> None:
        """`records` and `roster` are the fleet's own."""
        self._records = records
        self._roster = roster
        self._quarantine = quarantine
        self._changed, self._came_back = calls.changed, calls.came_back
        self._comebacks = calls.comebacks
        self._later: dict[str, asyncio.TimerHandle] = {}
        """What takes a client's word that it may train, where that came too soon after earlier ones."""
        self._waits: dict[str, asyncio.TimerHandle] = {}
        """What looks again when a quarantine is over."""
        self._availability: dict[str, pb.Availability] = {}
        self._working_for: dict[str, str] = {}

    def eligible(self, run_id: str, task: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
        """Clients that run `run_id` may draw now, in the order of id bytes.

        task: name and source of the fingerprint that a client must have.
        """
        return tuple(
            client_id for client_id in self.able(task, labels) if self._working_for.get(client_id, run_id) == run_id
        )

    def evaluators(self, task: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
        """Clients with held-out examples of the task, whatever they work for now, in the order of id bytes."""

        def examples(client_id: str) -> int:
            return max(each["eval_examples"] for each in self._records[client_id].tasks if is_of(each, task))

        return tuple(client_id for client_id in self.able(task, labels) if examples(client_id))

    def able(self, task: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
        """Clients that are here, or may come back within the grace, may work and have what it takes."""
        return tuple(
            client_id
            for client_id in self._roster.present()
            if self.availability(client_id).may_train
            and fits(self._records[client_id], task, labels)
            and not self._quarantine.seconds_left(client_id)
        )

    def work_for(self, run_id: str, clients: frozenset[str]) -> None:
        """From now on exactly these clients work for the run."""
        before = {client for client, run in self._working_for.items() if run == run_id}
        for client_id in before - clients:
            del self._working_for[client_id]
        for client_id in clients:
            self._working_for[client_id] = run_id
        if before != clients:
            self._changed()

    def run_of(self, client_id: str) -> str:
        """The run it works for now; empty for none."""
        return self._working_for.get(client_id, "")

    def registered(self, request: pb.RegisterRequest) -> None:
        """What the client says about itself as it comes: unless it says otherwise, it may be asked."""
        self._set_aside(request.client_id)
        said = request.availability if request.HasField("availability") else _MAY_TRAIN
        self._availability[request.client_id] = said

    def set_availability(self, client_id: str, availability: pb.Availability) -> None:
        """What the client says about itself.

        That it may not train holds at once. That it may again is told to the runs, which look at all clients and may
        push work: too soon after earlier times it waits for its own.
        """
        self._set_aside(client_id)
        before = self.availability(client_id)
        if before.may_train == availability.may_train:
            self._availability[client_id] = availability  # other words only
            return
        if availability.may_train:
            loop = asyncio.get_running_loop()
            if wait_s := self._comebacks.wait(client_id, loop.time()):
                take = partial(self.set_availability, client_id, availability)
                self._later[client_id] = loop.call_later(wait_s + 0.001, take)
                return
        self._availability[client_id] = availability
        log.info("client_availability", client=client_id, may_train=availability.may_train, why=availability.detail)
        self._changed()
        if availability.may_train:
            self._came_back(client_id)

    def _set_aside(self, client_id: str) -> None:
        """A newer word stands in the place of one that waits."""
        if timer := self._later.pop(client_id, None):
            timer.cancel()

    def availability(self, client_id: str) -> pb.Availability:
        """What the client last said."""
        return self._availability.get(client_id, _MAY_TRAIN)

    def wait_out(self, client_id: str) -> None:
        """Who may be drawn has changed, and will again when the client's quarantine is over."""
        if timer := self._waits.pop(client_id, None):
            timer.cancel()
        if left := self._quarantine.seconds_left(client_id):
            # Behind the end by a little, as with the grace; the clock on the wall may also have been set back.
            self._waits[client_id] = asyncio.get_running_loop().call_later(left + 0.02, self.wait_out, client_id)
        self._changed()

    def release(self, client_id: str) -> None:
        """Nothing stands against the client any more."""
        self._quarantine.drop(client_id)
        self.wait_out(client_id)

    def forget(self, client_id: str) -> None:
        """What the client said, and what stood against it, goes with it."""
        self._set_aside(client_id)
        self._comebacks.forget(client_id)
        self._availability.pop(client_id, None)
        self.release(client_id)


_MAY_TRAIN = pb.Availability(may_train=True)
