"""The daemon's own metrics page."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
import torch

from fl_client.errors import ConfigError
from fl_client.monitoring.metrics import Metrics
from protos.fl.v1.coordinator_pb2 import Device
from protos.fl.v1.training_pb2 import UpdateHeader


def test_the_page_has_what_was_counted() -> None:
    """The page has the bytes by direction, without a client id."""
    metrics = Metrics()
    metrics.bytes_sent(3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with metrics.serve("127.0.0.1", port), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    assert 'fl_client_transfer_bytes_total{direction="up"} 3.0' in text


def test_an_address_in_use_is_reported() -> None:
    """The message names the key and the address."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_listen: expected a free address, got 127.0.0.1:{port}"):
            Metrics().serve("127.0.0.1", port).__enter__()


def test_two_daemons_in_a_process_count_apart() -> None:
    """Each has its own registry."""
    first, second = Metrics(), Metrics()
    first.trained.inc()
    assert second.registry.get_sample_value("fl_client_rounds_trained_total") == 0


def test_unknown_values_have_no_sample() -> None:
    """A loss of 0 before the first update, or a last update in 1970, would be false, so the sample is missing."""
    metrics = Metrics()
    names = ("fl_client_training_loss", "fl_client_last_update_timestamp_seconds", "fl_client_examples")
    assert [metrics.registry.get_sample_value(name) for name in names] == [None, None, None]
    metrics.update_trained(UpdateHeader(training_loss=0.5, training_seconds=2.0))
    metrics.update_admitted()
    assert metrics.registry.get_sample_value("fl_client_training_loss") == 0.5
    assert metrics.registry.get_sample_value("fl_client_training_seconds_sum") == 2.0
    assert metrics.registry.get_sample_value("fl_client_last_update_timestamp_seconds")


def test_an_update_without_a_loss_keeps_the_last_one() -> None:
    """A full gradient has no loss."""
    metrics = Metrics()
    metrics.update_trained(UpdateHeader(training_loss=0.5))
    metrics.update_trained(UpdateHeader())
    assert metrics.registry.get_sample_value("fl_client_training_loss") == 0.5


@pytest.mark.parametrize(("device", "memory"), [("cpu", {}), ("cuda:0", {"allocated": 3.0, "reserved": 7.0})])
def test_memory_is_reported_for_a_cuda_device_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, memory: dict[str, float]
) -> None:
    """Read at each scrape. For a CPU there is process_resident_memory_bytes."""
    monkeypatch.setattr(
        "fl_client.monitoring.metrics.describe", lambda device: Device(kind=device.type, name="a maker's")
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    metrics = Metrics()
    metrics.set_device(torch.device(device), 12, tmp_path)
    kinds = ("allocated", "reserved")
    found = {kind: metrics.registry.get_sample_value("fl_client_device_memory_bytes", {"kind": kind}) for kind in kinds}
    assert {kind: value for kind, value in found.items() if value is not None} == memory
    named = {"device": device, "name": "a maker's"}
    assert metrics.registry.get_sample_value("fl_client_device_info", named) == 1
    assert metrics.registry.get_sample_value("fl_client_examples") == 12
