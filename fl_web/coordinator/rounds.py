"""The committed rounds of runs, as compact values. Kept for the views: only new rounds are read again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from fl_web.coordinator.calls import Calls
from protos.fl.v1 import admin_pb2 as pb

_MOST_RUNS, _MOST_ROUNDS = 40, 60_000
"""Kept in memory."""
_REREAD = 20
"""Newest rounds that are read again each time: their evaluations may have come since."""


@dataclass(frozen=True, slots=True)
class Round:
    """One committed round. Bytes are tensor bytes; times are Unix seconds of the coordinator's clock."""

    round: int
    committed: float
    seconds: float
    attempts: int
    accepted: int
    dropped: int
    training_loss: float | None
    metrics: Mapping[str, float]
    down: int
    up: int
    total_down: int
    """Since the run was created, up to and with this round."""
    total_up: int
    norms: Mapping[str, float]
    cosine: float | None
    phases: Mapping[str, float]
    """Seconds by phase."""
    refused: Mapping[str, int]
    """Refused updates by reason."""
    assignments: Mapping[str, int]
    """By final state."""
    digest: str

    @classmethod
    def of(cls, summary: pb.RoundSummary, before: Round | None) -> Self:
        """From a message. before: the round before it."""
        account = summary.account
        down, up = (before.total_down, before.total_up) if before else (0, 0)
        return cls(
            summary.round, summary.committed.ToNanoseconds() / 1e9, summary.seconds, summary.attempts,
            summary.accepted, summary.dropped,
            summary.training_loss if summary.HasField("training_loss") else None, dict(summary.metrics),
            summary.bytes_down, summary.bytes_up, down + summary.bytes_down, up + summary.bytes_up,
            dict(account.norms), account.cosine if account.HasField("cosine") else None, dict(account.seconds),
            dict(account.refused), dict(account.assignments), summary.model_digest,
        )  # fmt: skip


class Rounds:
    """The committed rounds of the runs that were looked at last."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._kept: OrderedDict[str, list[Round]] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, run_id: str, since: float | None = None) -> list[Round]:
        """All committed rounds, in order. The list is not changed later. since: as of `Calls.call`."""
        lock = self._locks.setdefault(run_id, asyncio.Lock())
        async with lock:
            known = self._kept.get(run_id, [])
            rounds = known[: max(0, len(known) - _REREAD)]
            request = pb.ListRoundsRequest(run_id=run_id, page_size=1000, first_round=len(rounds))
            while True:
                page = await self._calls.call("ListRounds", request, pb.ListRoundsResponse, since)
                for summary in page.rounds:
                    rounds.append(Round.of(summary, rounds[-1] if rounds else None))
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
        self._keep(run_id, rounds)
        return rounds

    def _keep(self, run_id: str, rounds: list[Round]) -> None:
        self._kept[run_id] = rounds
        self._kept.move_to_end(run_id)
        while len(self._kept) > 1 and (
            len(self._kept) > _MOST_RUNS or sum(map(len, self._kept.values())) > _MOST_ROUNDS
        ):
            oldest, _ = self._kept.popitem(last=False)
            self._locks.pop(oldest, None)
