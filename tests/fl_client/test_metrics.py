"""The daemon's own metrics page."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from fl_client.errors import ConfigError
from fl_client.metrics import Metrics


def test_the_page_has_what_was_counted():
    """Bytes by direction stand in the exposition, without any client id."""
    metrics = Metrics()
    metrics.sent(3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with metrics.listening("127.0.0.1", port), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    assert 'fl_client_transfer_bytes_total{direction="up"} 3.0' in text


def test_a_taken_address_is_told():
    """The message names the key and the address."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_listen: expected a free address, got 127.0.0.1:{port}"):
            Metrics().listening("127.0.0.1", port).__enter__()


def test_two_daemons_in_a_process_count_apart():
    """Each has a registry of its own."""
    first, second = Metrics(), Metrics()
    first.trained.inc()
    assert second.registry.get_sample_value("fl_client_rounds_trained_total") == 0
