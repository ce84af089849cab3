"""The shared constants of both ends are consistent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from protos import wire
from protos.fl.v1.training_pb2 import PAYLOAD_KIND_NAMED, LocalTraining, OptimizerSpec, PayloadKind
from protos.wire import numbers


def test_a_dead_peer_is_noticed_within_45_seconds() -> None:
    """The longest silence before a ping and the wait for its answer together, on both sides."""
    for options in (dict(wire.client_options()), dict(wire.server_options())):
        assert options["grpc.keepalive_time_ms"] == 30_000
        assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 45_000
        # Wait for the answer to any ping; the default is a minute.
        assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"]
        # Also between calls, and without any data.
        assert (options["grpc.keepalive_permit_without_calls"], options["grpc.http2.max_pings_without_data"]) == (1, 0)


def test_a_client_has_one_connection_of_its_own() -> None:
    """It shares its connection with no other channel, and grpc repeats no call by itself."""
    options = dict(wire.client_options())
    assert (options["grpc.use_local_subchannel_pool"], options["grpc.enable_retries"]) == (1, 0)


def test_the_server_takes_pings_twice_as_often_as_clients_send_them() -> None:
    """A jittered ping must never look like abuse: the server would end the connection."""
    server, client = dict(wire.server_options()), dict(wire.client_options())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] * 2 <= client["grpc.keepalive_time_ms"]


def test_the_largest_chunk_fits_a_message() -> None:
    """A chunk of the size allowed is never refused by the transport."""
    for options in (dict(wire.client_options()), dict(wire.server_options())):
        assert wire.CHUNK_BYTES <= wire.MAX_CHUNK_BYTES < options["grpc.max_receive_message_length"]


def test_a_second_server_on_the_port_fails() -> None:
    """Without the option, Linux would share the port out and half of the clients would meet the other coordinator."""
    servers = [grpc.server(ThreadPoolExecutor(1), options=wire.server_options()) for _ in range(2)]
    port = servers[0].add_insecure_port("127.0.0.1:0")
    with pytest.raises(RuntimeError, match="Failed to bind"):
        servers[1].add_insecure_port(f"127.0.0.1:{port}")
    for server in servers:
        server.stop(grace=None).wait()


def test_four_payloads_have_kinds_of_their_own() -> None:
    """Older peers know them by the kind alone, so they have no name."""
    for payload in ("delta", "full_gradient", "variate_change", "client_momentum"):
        assert PayloadKind.Name(wire.payload_kind(payload)) == f"PAYLOAD_KIND_{payload.upper()}"
        assert not wire.payload_name(payload)


@pytest.mark.parametrize("payload", ["optimizer.exp_avg", "named", "unspecified", "Delta"])
def test_every_other_payload_has_its_name_in_the_message(payload: str) -> None:
    """Also one with the name of a kind that is not a payload."""
    assert (wire.payload_kind(payload), wire.payload_name(payload)) == (PAYLOAD_KIND_NAMED, payload)
    assert wire.check_payload_name(payload) == payload


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "buffers", "é", "a\n"])
def test_a_payload_cannot_have_any_name(name: str) -> None:
    """Names are short and plain, and "buffers" means the buffers of the model."""
    with pytest.raises(ValueError, match="expected the name of a payload, 1 to 64 of a-z"):
        wire.check_payload_name(name)


def test_the_plain_numbers_of_a_message() -> None:
    """By name, also those that are zero; no list, message, enum, text, or field of a oneof."""
    training = LocalTraining(local_steps=3, weight_decay=0.5, optimizer=OptimizerSpec(name="adam"))
    assert numbers(training) == {
        "learning_rate": 0.0, "batch_size": 0, "weight_decay": 0.5, "max_gradient_norm": 0.0, "seed": 0,
        "population": 0, "population_examples": 0, "micro_batch_size": 0, "schedule_start": 0, "schedule_steps": 0,
    }  # fmt: skip
