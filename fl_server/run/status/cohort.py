"""The clients of the round under way, each with its phase, as operators see them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fl_server.rounds.state import Phase, RoundState
from fl_server.run.status.client_transfers import ClientTransfer, ClientTransfers

_OUT, _TRANSFERS = "out", ("downloading", "uploading")
_CUT = "the transfer was cut; the client goes on with it"
_UNKNOWN = "it fetched nothing since the coordinator started; it trains if it held the model before"
HasAll = Callable[[str], bool]
"""Whether every resource of the exchange went out to the process of a client."""


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
        """Whether bytes are moved in this phase."""
        return self.transfer is not None and self.phase in _TRANSFERS

    @property
    def seconds(self) -> float | None:
        """Since the phase began; None if that is unknown."""
        known = self.transfer is not None and self.phase in {*_TRANSFERS, "training", "checking"}
        return time.monotonic() - self.transfer.changed if self.transfer is not None and known else None


def members(state: RoundState, transfers: ClientTransfers, has_all: HasAll, clients: Iterable[str]) -> list[Member]:
    """These clients of the cohort, in the order given."""
    return [_member(state, transfers, has_all, client) for client in clients]


def drawn(state: RoundState) -> list[str]:
    """The clients of the exchange under way, in the order of id; none between rounds and after the end."""
    return [] if state.phase is Phase.ENDED else sorted(state.drawn)


def by_phase(state: RoundState, transfers: ClientTransfers, has_all: HasAll) -> Counter[str]:
    """The number of clients in each phase."""
    return Counter(member.phase for member in members(state, transfers, has_all, drawn(state)))


def _member(state: RoundState, transfers: ClientTransfers, has_all: HasAll, client: str) -> Member:
    transfer = transfers.newest.get(client)
    if state.arrivals.has(client):
        return Member(client, "delivered", transfer)
    if client in state.out:
        phase, why = transfers.outs.get(client, (_OUT, ""))
        return Member(client, phase, None, why)
    if transfer is not None and transfer.direction == "up":
        return _in_transfer(client, "uploading", "checking", transfer)
    if has_all(client) and not (transfer is not None and transfer.open):
        return Member(client, "training", transfer)
    if transfer is not None:
        return _in_transfer(client, "downloading", "downloading", transfer)
    return Member(client, "assigned", None, _UNKNOWN if client in transfers.unknown else "")


def _in_transfer(client: str, phase: str, after: str, transfer: ClientTransfer) -> Member:
    """A client that moves bytes, or has moved all of this transfer."""
    if transfer.done >= transfer.size:
        return Member(client, after, transfer)
    return Member(client, phase, transfer, "" if transfer.open else _CUT)
