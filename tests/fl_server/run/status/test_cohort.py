"""The phases of the clients of a round."""

from __future__ import annotations

from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState
from fl_server.run.round_statistics import ClientTransfers
from fl_server.run.status import by_phase, drawn, members

CLIENTS = frozenset({"a", "b", "c"})
ALL, NOBODY = CLIENTS, frozenset[str]()
"""The clients that have all resources."""


def state(**values: object) -> RoundState:
    """A round that collects from three clients."""
    fields: dict[str, object] = {"phase": Phase.COLLECTING, "drawn": CLIENTS, "goal": 3, **values}
    return RoundState(RoundPolicy(seed=0), 1, **fields)  # type: ignore[arg-type]  # any field of it


def phase_of(transfers: ClientTransfers, round_state: RoundState | None = None, *, has_all: bool = False) -> str:
    """The phase of client a."""
    (member,) = members(round_state or state(), transfers, ALL if has_all else NOBODY, ["a"])
    return member.phase


def test_a_client_goes_through_the_phases() -> None:
    """Each begins with its transfer; a delivered update is the end."""
    transfers = ClientTransfers()
    seen = [phase_of(transfers)]
    with transfers.transfer("a", "down", 100, 0) as fetched:
        seen.append(phase_of(transfers))
        fetched.done = 100
    seen.append(phase_of(transfers, has_all=True))
    with transfers.transfer("a", "up", 80, 0) as sent:
        sent.done = 30
        (member,) = members(state(), transfers, ALL, ["a"])
        assert (member.moving, member.transfer) == (True, sent)
        seen.append(member.phase)
        sent.done = 80
        seen.append(phase_of(transfers))
    seen.append(phase_of(transfers, state(admitted=(("a", b""),))))
    assert seen == ["assigned", "downloading", "training", "uploading", "checking", "delivered"]


def test_a_client_trains_only_with_all_resources() -> None:
    """The model alone is not enough where a method sends a direction too."""
    transfers = ClientTransfers()
    with transfers.transfer("a", "down", 100, 0) as model:
        model.done = 100
    assert phase_of(transfers, has_all=False) == "downloading"
    with transfers.transfer("a", "down", 50, 0) as direction:
        direction.done = 50
        assert phase_of(transfers, has_all=True) == "downloading", "the stream is still open"
    assert phase_of(transfers, has_all=True) == "training"


def test_a_client_that_held_everything_trains() -> None:
    """It fetches nothing in this round. Since when it trains is not known."""
    (member,) = members(state(), ClientTransfers(), ALL, ["a"])
    assert (member.phase, member.seconds) == ("training", None)


def test_a_cut_transfer_is_named() -> None:
    """The phase stays that of the transfer: the client goes on with it."""
    transfers = ClientTransfers()
    with transfers.transfer("a", "down", 100, 0) as fetched:
        fetched.done = 50
    (member,) = members(state(), transfers, NOBODY, ["a"])
    assert (member.phase, member.detail) == ("downloading", "the transfer was cut; the client goes on with it")
    with transfers.transfer("a", "up", 100, 0) as sent:
        sent.done = 50
    (member,) = members(state(), transfers, ALL, ["a"])
    assert (member.phase, member.detail[:20]) == ("uploading", "the transfer was cut")


def test_another_exchange_begins_without_transfers() -> None:
    """The upload of the first exchange is no upload of the second one; another attempt keeps what is known."""
    transfers = ClientTransfers()
    transfers.begin(3, 0)
    with transfers.transfer("a", "up", 100, 100):
        pass
    transfers.begin(3, 0)
    assert phase_of(transfers) == "checking"
    transfers.begin(3, 1)
    assert phase_of(transfers) == "assigned"


def test_after_a_restart_it_is_stated_what_is_not_known() -> None:
    """Until the client transfers something. Clients of a later attempt or exchange have no such text."""
    transfers = ClientTransfers()
    transfers.resume(3, 0, ["a"])
    transfers.begin(3, 0)
    first, second = members(state(), transfers, NOBODY, ["a", "b"])
    assert (first.phase, first.detail[:42]) == ("assigned", "it fetched nothing since the coordinator s")
    assert (second.phase, second.detail) == ("assigned", "")
    transfers.begin(3, 1)
    assert members(state(), transfers, NOBODY, ["a"])[0].detail == ""


def test_a_client_that_is_out_has_the_reason() -> None:
    """As its assignment ended; a restarted coordinator does not know it any more."""
    transfers = ClientTransfers(outs={"a": ("refused", "update refused: norm")})
    (known, unknown) = members(state(out=frozenset({"a", "b"})), transfers, NOBODY, ["a", "b"])
    assert (known.phase, known.detail) == ("refused", "update refused: norm")
    assert (unknown.phase, unknown.detail) == ("out", "")


def test_the_clients_are_counted_by_phase() -> None:
    """In the order of id; nobody after the end of the run."""
    counts = by_phase(state(admitted=(("b", b""),)), ClientTransfers(), NOBODY)
    assert counts == {"delivered": 1, "assigned": 2}
    assert drawn(state()) == ["a", "b", "c"]
    assert drawn(state(phase=Phase.ENDED)) == []
