"""The settings files in the manifests are read by the programs' own readers, as they are mounted together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_client.settings.config import load_config
from fl_client.training.data import _partition_spec
from fl_common.settings import read_settings
from fl_server.settings.config import ServerConfig
from tests.k8s.manifests import ROOT

BASE = ROOT / "k8s/base/server.toml"
PRODUCTION = ROOT / "k8s/overlays/production/production.toml"
ENROLLMENT = ROOT / "k8s/components/enrollment/enrollment.toml"
CLIENTS = ROOT / "k8s/gpu-clients"
NODES = sorted((CLIENTS / "nodes").glob("*.toml"))


def test_the_base_is_read_by_the_coordinator() -> None:
    """Ports and paths are those of the images, and TLS requires client certificates."""
    config = read_settings(BASE, ServerConfig)
    assert (config.listen, config.admin_listen, config.metrics_listen, config.health_listen) == tuple(
        f"0.0.0.0:{port}" for port in (7070, 7071, 7072, 7073)
    )
    assert config.tls is not None
    assert config.tls.client_ca == Path("/etc/impetus/clients/client-ca.crt")
    assert config.state_dir == Path("/var/lib/impetus")


def test_the_drain_lasts_as_long_as_the_longest_upload() -> None:
    """256 MiB at 20 Mbit/s take 256 * 1.048576 * 8 / 20 = 107 s; 5 s and more are left for a commit."""
    config = read_settings(BASE, ServerConfig)
    longest_s = config.limits.max_update_mib * 1.048576 * 8 / 20
    assert config.drain_grace_s > longest_s + 5


def test_production_lies_on_top_of_the_base() -> None:
    """Its keys are used, and missing ones are the base's."""
    base, config = read_settings(BASE, ServerConfig), read_settings(BASE, ServerConfig, [PRODUCTION])
    assert (config.durability, config.threads) == ("power", 4)
    assert config.model_copy(update={"durability": base.durability, "threads": base.threads}) == base


def test_an_overlay_with_postgresql_builds_on_all_others(tmp_path: Path) -> None:
    """The Secret of the component postgres sets one key, and all others apply too."""
    (tmp_path / "ledger.toml").write_text('ledger = "postgresql://impetus@db:5432/impetus?sslmode=verify-full"\n')
    config = read_settings(BASE, ServerConfig, [PRODUCTION, tmp_path / "ledger.toml"])
    assert config.ledger is not None
    assert config.ledger.get_secret_value().startswith("postgresql://impetus@db:5432/impetus")
    assert config.durability == "power"


def test_enrollment_builds_on_all_others() -> None:
    """The port is the one that daemons use, and the authority's key is that of the mounted Secret."""
    config = read_settings(BASE, ServerConfig, [PRODUCTION, ENROLLMENT])
    assert config.enroll_listen == "0.0.0.0:7074"
    assert config.enrollment is not None
    assert config.enrollment.ca_key == Path("/etc/impetus/authority/tls.key")


@pytest.mark.parametrize("node", NODES, ids=lambda path: path.stem)
def test_a_node_of_the_fleet_is_read_by_the_daemon(node: Any) -> None:
    """Its own file on top of the common one: a certificate that it renews, and one part of a partition."""
    config = load_config(CLIENTS / "client.toml", [node])
    assert config.tls is not None
    assert config.tls.renew
    assert config.tls.folder == config.state_dir / "tls"
    assert config.tls.enroll_server == "fl-server.impetus.svc.cluster.local:7074"
    assert config.shard.partition is not None
    assert config.shard.index in range(_partition_spec(config.shard.partition).clients)
    assert len(NODES) == _partition_spec(config.shard.partition).clients


def test_the_common_file_alone_is_no_configuration() -> None:
    """A node without its own file is refused with a message, and gets no other node's shard."""
    with pytest.raises(Exception, match="shard: partition needs an index"):
        load_config(CLIENTS / "client.toml")
