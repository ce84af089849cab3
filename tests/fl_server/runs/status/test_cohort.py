"""The phases of the clients of a round."""

from __future__ import annotations

from fl_server.rounds.state import Phase, RoundPolicy, RoundState
from fl_server.runs.status.client_transfers import ClientTransfers
from fl_server.runs.status.cohort import by_phase, drawn, members

CLIENTS = frozenset({"a", "b", "c"})


def state(**values: object) -> RoundState:
    """A round that collects from three clients."""
    fields: dict[str, object] = {"phase": Phase.COLLECTING, "drawn": CLIENTS, "goal": 3, **values}
    return RoundState(RoundPolicy(seed=0), 1, **fields)  # type: ignore[arg-type]  # any field of it


def phase_of(transfers: ClientTransfers, round_state: RoundState | None = None) -> str:
    """The phase of client a."""
    (member,) = members(round_state or state(), transfers, ["a"])
    return member.phase


def test_a_client_goes_through_the_phases() -> None:
    """Each begins with its transfer; a delivered update is the end."""
    transfers = ClientTransfers()
    seen = [phase_of(transfers)]
    with transfers.transfer("a", "down", 100, 0) as fetched:
        seen.append(phase_of(transfers))
        fetched.done = 100
    seen.append(phase_of(transfers))
    with transfers.transfer("a", "up", 80, 0) as sent:
        sent.done = 30
        (member,) = members(state(), transfers, ["a"])
        assert (member.moving, member.transfer) == (True, sent)
        seen.append(member.phase)
        sent.done = 80
        seen.append(phase_of(transfers))
    seen.append(phase_of(transfers, state(admitted=(("a", b""),))))
    assert seen == ["assigned", "downloading", "training", "uploading", "checking", "delivered"]


def test_a_cut_transfer_returns_to_the_phase_before() -> None:
    """A client with half a model has to fetch again; one with half an upload has trained."""
    transfers = ClientTransfers()
    with transfers.transfer("a", "down", 100, 0) as fetched:
        fetched.done = 50
    assert phase_of(transfers) == "assigned"
    with transfers.transfer("a", "up", 100, 0) as sent:
        sent.done = 50
    assert phase_of(transfers) == "training"


def test_a_client_that_is_out_has_the_reason() -> None:
    """As its assignment ended; a restarted coordinator does not know it any more."""
    transfers = ClientTransfers(outs={"a": ("refused", "update refused: norm")})
    (known, unknown) = members(state(out=frozenset({"a", "b"})), transfers, ["a", "b"])
    assert (known.phase, known.detail) == ("refused", "update refused: norm")
    assert (unknown.phase, unknown.detail) == ("out", "")


def test_the_clients_are_counted_by_phase() -> None:
    """In the order of id; nobody after the end of the run."""
    counts = by_phase(state(admitted=(("b", b""),)), ClientTransfers())
    assert counts == {"delivered": 1, "assigned": 2}
    assert drawn(state()) == ["a", "b", "c"]
    assert drawn(state(phase=Phase.ENDED)) == []
