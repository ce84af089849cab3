"""The clients of the round under way, each with its phase, as operators see them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fl_server.rounds.state import Phase, RoundState
from fl_server.runs.status.client_transfers import ClientTransfer, ClientTransfers

_OUT = "out"


@dataclass(frozen=True, slots=True)
class Member:
    """One client of the cohort."""

    client: str
    phase: str
    transfer: ClientTransfer | None = None
    """Under way, or ended with the phase before."""
    detail: str = ""

    @property
    def moving(self) -> bool:
        """Whether bytes are moved now."""
        return self.transfer is not None and self.transfer.open

    @property
    def seconds(self) -> float | None:
        """Since the phase began; None if that is unknown."""
        known = self.transfer is not None and self.phase in {"downloading", "training", "uploading", "checking"}
        return time.monotonic() - self.transfer.changed if self.transfer is not None and known else None


def members(state: RoundState, transfers: ClientTransfers, clients: Iterable[str]) -> list[Member]:
    """These clients of the cohort, in the order given."""
    return [_member(state, transfers, client) for client in clients]


def drawn(state: RoundState) -> list[str]:
    """The clients of the exchange under way, in the order of id; none between rounds and after the end."""
    return [] if state.phase is Phase.ENDED else sorted(state.drawn)


def by_phase(state: RoundState, transfers: ClientTransfers) -> Counter[str]:
    """The number of clients in each phase."""
    return Counter(member.phase for member in members(state, transfers, drawn(state)))


def _member(state: RoundState, transfers: ClientTransfers, client: str) -> Member:
    transfer = transfers.newest.get(client)
    if state.arrivals.has(client):
        return Member(client, "delivered", transfer)
    if client in state.out:
        phase, why = transfers.outs.get(client, (_OUT, ""))
        return Member(client, phase, None, why)
    if transfer is None:
        return Member(client, "assigned")
    return Member(client, _working(transfer), transfer)


def _working(transfer: ClientTransfer) -> str:
    if transfer.direction == "down":
        return "downloading" if transfer.open else "training" if transfer.done >= transfer.size else "assigned"
    whole = transfer.done >= transfer.size
    return "checking" if whole else "uploading" if transfer.open else "training"
