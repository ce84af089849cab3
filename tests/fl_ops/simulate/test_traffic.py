"""The bytes that a networked run would transfer."""

from __future__ import annotations

import numpy as np

from fl_ops.simulate.traffic import Name, Names, Sent, TrafficCounter
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_FROZEN, RESOURCE_KIND_MODEL

SIZE = 4000
VALUES = np.random.default_rng(1).normal(size=SIZE // 4).astype(np.float32)
FROZEN: Names = {(RESOURCE_KIND_FROZEN, b"f"): 500}


def sent(traffic: TrafficCounter, round_: int) -> Names:
    """Send the model of a round, which differs little from the one before. Returns what its clients load."""
    name: Name = (RESOURCE_KIND_MODEL, bytes([round_]))
    traffic.send({RESOURCE_KIND_MODEL: Sent(name, (VALUES + round_ / 1000).tobytes(), 4)})
    return {name: SIZE, **FROZEN}


def test_only_clients_of_the_round_before_get_a_difference() -> None:
    """Another one gets the whole model, and frozen parts once."""
    traffic = TrafficCounter()
    first = sent(traffic, 0)
    assert [traffic.download([client], first) for client in "ab"] == [SIZE + 500] * 2
    second = sent(traffic, 1)
    [(base, smaller)] = traffic.offers.values()
    assert base in first
    assert smaller < SIZE
    assert [traffic.download([client], second) for client in "ac"] == [smaller, SIZE + 500]
    third = sent(traffic, 2)
    [(_, smaller)] = traffic.offers.values()
    assert [traffic.download([client], third) for client in "abc"] == [smaller, SIZE, smaller]


def test_a_model_that_stays_keeps_its_difference() -> None:
    """The second exchange of a round, and a round that is prepared again, send the same model."""
    traffic = TrafficCounter()
    traffic.download(["a"], sent(traffic, 0))
    second = sent(traffic, 1)
    offers = traffic.offers
    assert len(offers) == 1
    assert sent(traffic, 1) == second
    assert traffic.offers == offers


def test_without_differences_none_are_made() -> None:
    """Of bundles that are not announced with `send`, and of what differs in size or in everything."""
    traffic = TrafficCounter()
    draw = np.random.default_rng(2)
    for round_, size in enumerate((SIZE, SIZE, 2 * SIZE)):
        name = (RESOURCE_KIND_MODEL, bytes([round_]))
        traffic.send({RESOURCE_KIND_MODEL: Sent(name, draw.bytes(size), 1)})
        assert traffic.offers == {}
        assert traffic.download(["a"], {name: size}) == size


def test_a_simulation_that_goes_on_sends_what_it_sent() -> None:
    """Its first round has the difference that was saved, although the base is gone; later ones have new ones."""
    saved, traffic = TrafficCounter(), TrafficCounter()
    saved.download(["a"], sent(saved, 0))
    second = sent(saved, 1)
    sent(traffic, 7)
    traffic.put_back(saved.held, saved.offers)
    assert sent(traffic, 1) == second
    assert traffic.missing("a", second) == saved.missing("a", second) < SIZE
    saved.download(["a"], second)
    traffic.download(["a"], second)
    assert traffic.missing("a", sent(traffic, 2)) == saved.missing("a", sent(saved, 2)) < SIZE
