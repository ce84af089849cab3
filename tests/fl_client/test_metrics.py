"""The daemon's own metrics page."""

from __future__ import annotations

import socket
import urllib.request

import pytest
import torch

from fl_client.errors import ConfigError
from fl_client.metrics import Metrics
from protos.fl.v1.coordinator_pb2 import Device
from protos.fl.v1.training_pb2 import UpdateHeader


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


def test_what_is_not_known_yet_is_not_there():
    """A loss of 0 before the first update, or a last update in 1970, would be a lie; a missing sample is none."""
    metrics = Metrics()
    names = ("fl_client_training_loss", "fl_client_last_update_timestamp_seconds", "fl_client_examples")
    assert [metrics.registry.get_sample_value(name) for name in names] == [None, None, None]
    metrics.computed(UpdateHeader(training_loss=0.5, training_seconds=2.0))
    metrics.admitted()
    assert metrics.registry.get_sample_value("fl_client_training_loss") == 0.5
    assert metrics.registry.get_sample_value("fl_client_training_seconds_sum") == 2.0
    assert metrics.registry.get_sample_value("fl_client_last_update_timestamp_seconds") > 0


def test_an_update_without_a_loss_leaves_the_last_one():
    """A full gradient has none to tell."""
    metrics = Metrics()
    metrics.computed(UpdateHeader(training_loss=0.5))
    metrics.computed(UpdateHeader())
    assert metrics.registry.get_sample_value("fl_client_training_loss") == 0.5


@pytest.mark.parametrize(("device", "memory"), [("cpu", {}), ("cuda:0", {"allocated": 3.0, "reserved": 7.0})])
def test_memory_is_told_of_a_cuda_device_alone(monkeypatch, tmp_path, device, memory):
    """Looked up at the scrape; of a CPU process_resident_memory_bytes says what there is to say."""
    monkeypatch.setattr("fl_client.metrics.describe", lambda device: Device(kind=device.type, name="a maker's"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    metrics = Metrics()
    metrics.about(torch.device(device), 12, tmp_path)
    kinds = ("allocated", "reserved")
    found = {each: metrics.registry.get_sample_value("fl_client_device_memory_bytes", {"kind": each}) for each in kinds}
    assert {kind: value for kind, value in found.items() if value is not None} == memory
    named = {"device": device, "name": "a maker's"}
    assert metrics.registry.get_sample_value("fl_client_device_info", named) == 1
    assert metrics.registry.get_sample_value("fl_client_examples") == 12
