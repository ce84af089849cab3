"""The work that an update must report, also where a client's task makes its batches."""

from __future__ import annotations

from typing import Any

import pytest

from fl_server.admission.client_rules import ExpectedWork, RegisteredData, registered_data
from fl_server.clients.draw_rules import Requirements, offer_for
from fl_server.clients.registration import check_sizes
from fl_server.errors import InvalidInput
from fl_server.run_settings.sections import LocalSection
from fl_server.store.records import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb

TASK = {"name": "t", "version": "1", "source": "sha256:0"}
ANY = Requirements(TASK, {})


def difference(header: tuple[int, int], own_batches: int, **local: Any) -> str:
    """The contradiction of (examples, steps) with two epochs, or the settings given, of 10 examples."""
    section = LocalSection(learning_rate=0.1, batch_size=4, **(local or {"epochs": 2}))
    expected = ExpectedWork(10, section, trains=True, own_batches=own_batches)
    return expected.difference(*header)


@pytest.mark.parametrize(("own_batches", "steps"), [(0, 6), (5, 10), (1, 2)])
def test_steps_of_two_epochs(own_batches: int, steps: int) -> None:
    """Ten examples in batches of four are three steps an epoch; own batches count as registered."""
    assert not difference((10, steps), own_batches)
    assert f"expected {steps} steps, as ordered for 10 examples, got {steps + 1}" in difference(
        (10, steps + 1), own_batches
    )


def test_steps_that_the_run_gives_do_not_depend_on_batches() -> None:
    """`steps` is the number for every client."""
    assert not difference((10, 7), 5, steps=7)
    assert difference((10, 10), 5, steps=7)


def record(*offers: dict[str, Any]) -> ClientRecord:
    """A client with these offers of the task."""
    return ClientRecord("a", 1.0, 2.0, tasks=[{**TASK, "eval_examples": 0, **offer} for offer in offers])


def data(client: ClientRecord | None, requires: Requirements = ANY) -> RegisteredData:
    """The data of the offer that a run uses."""
    return registered_data(offer_for(requires, client))


def test_registered_data() -> None:
    """A task without batches of its own has none; of several offers the one with the labels counts; none is no data."""
    north, south = ({"data": name, "labels": {"site": name}} for name in ("north", "south"))
    assert data(record({"train_examples": 9})) == RegisteredData(9)
    both = record({"train_examples": 9, "train_batches": 3, **north}, {"train_examples": 4, **south})
    assert data(both) == (9, 3)
    assert data(both, Requirements(TASK, {"site": "south"})) == (4, 0)
    assert data(record()) == data(None) == (0, 0)


def test_more_batches_than_examples_are_refused() -> None:
    """A batch without an example cannot exist, and a large number would choose the client's weight in FedNova."""
    check_sizes(pb.RegisterRequest(tasks=[pb.TaskOffer(name="t", train_examples=5, train_batches=5)]))
    with pytest.raises(InvalidInput, match=r"tasks\.train_batches.*5 batches at most, as the task 't'.*6"):
        check_sizes(pb.RegisterRequest(tasks=[pb.TaskOffer(name="t", train_examples=5, train_batches=6)]))
