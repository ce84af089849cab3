"""What devices and coordinator promise of messages, as it is seen on the wire and in the ledger.

A cohort is written before its work is sent, and secure aggregation has one message and one answer a stage.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Set as AbstractSet
from contextlib import closing
from pathlib import Path
from typing import Any

from fl_common.secure_aggregation.terms import Terms
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment, SecureStage, StageMessage
from tests.deterministic.seen import Seen


class Promises:
    """The messages of one life."""

    def __init__(self, seen: Seen, lied: AbstractSet[bytes]) -> None:
        """lied: the digests of updates that no device has made."""
        self._seen, self._lied = seen, lied
        self._answers: dict[tuple[str, int, int, int], bytes] = {}
        """(client, round, draw, stage) -> what left the device; for the masked update the digest of its bytes."""
        self._messages: dict[tuple[str, int, int, int], bytes] = {}
        """The same -> what the coordinator sent."""
        self._terms: dict[tuple[int, int], bytes] = {}
        """(round, draw) -> the terms that the coordinator sent: they have the cohort."""

    def sends(self, client: str, method: str, message: bytes) -> None:
        """A device sends a message."""
        if method == "AnswerStage":
            answer = pb.AnswerStageRequest.FromString(message).answer
            self._answered(client, (answer.key.round, answer.draw, answer.stage), answer.content)
        elif method == "SubmitUpdate":
            part = pb.SubmitUpdateRequest.FromString(message)
            header = part.header
            honest = part.HasField("header") and header.digest.value not in self._lied
            if honest and self._drawn(client, header.key.round, header.attempt):
                place = (header.key.round, header.attempt, SecureStage.SECURE_STAGE_MASKED)
                self._answered(client, place, header.digest.value)

    def _drawn(self, client: str, round_: int, draw: int) -> bool:
        """Whether the device has answered this draw before: so it is one of secure aggregation."""
        return (client, round_, draw, SecureStage.SECURE_STAGE_KEYS) in self._answers

    def _answered(self, client: str, place: tuple[int, int, int], content: bytes) -> None:
        first = self._answers.setdefault((client, *place), content)
        if first != content:
            self._seen.violations.append(f"a device answers each stage in one way: not {client} in {place}")

    def forgets(self, client: str) -> None:
        """A device has lost its directory. It may make new keys, which are of use with no message of the others."""
        for place in [place for place in self._answers if place[0] == client and place[3] == _KEYS]:
            del self._answers[place]

    def assigned(self, state: Path, client: str, assignment: Assignment) -> None:
        """The coordinator sends an assignment. state: its state directory; only what is committed there is seen."""
        key, attempt = assignment.key, assignment.attempt
        with closing(sqlite3.connect(f"file:{state / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
            cohorts = ledger.execute(
                "select cohort from attempts where round = ? and exchange = ? and attempt <= ?",
                (key.round, key.exchange, attempt),
            ).fetchall()
        if not any(client in json.loads(cohort) for (cohort,) in cohorts):
            where = f"{client} in round {key.round}.{key.exchange}, attempt {attempt}"
            self._seen.violations.append(f"cohorts are written before their work: not with {where}")

    def pushed(self, client: str, response: Any) -> None:
        """The coordinator sends a message of a stream."""
        assignment = getattr(response, "assignment", None)
        if isinstance(assignment, Assignment) and assignment.HasField("secure_aggregation"):
            terms = Terms.from_bytes(assignment.secure_aggregation.terms)
            draw = terms.place.round, terms.place.draw
            if self._terms.setdefault(draw, assignment.secure_aggregation.terms) != terms.to_bytes():
                self._seen.violations.append(f"a draw has one cohort: another one for {client} in {draw}")
        message = getattr(response, "stage", None)
        if isinstance(message, StageMessage) and message.content:
            place = (client, message.key.round, message.draw, message.stage)
            if self._messages.setdefault(place, message.content) != message.content:
                self._seen.violations.append(f"a stage has one message: not for {client} in {place[1:]}")


_KEYS = SecureStage.SECURE_STAGE_KEYS
