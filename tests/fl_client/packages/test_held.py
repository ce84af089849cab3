"""The packages of a device survive kills, whole or not at all; nothing that has changed since it came is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_client.packages import held as module
from fl_client.packages.held import HeldPackages
from fl_client.policy.config import Policy
from fl_common.packages import PackageRefused, unpack
from fl_common.signatures import SigningKey, make_key
from tests.processes.wheels import good_wheels, package


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    """The key of the policy."""
    return make_key(tmp_path / "key.pem")


def policy_of(key: SigningKey, *, approval: bool = False) -> Policy:
    """A policy that names the key."""
    return Policy.model_validate({"packages": {"signers": [key.signer], "approval": approval}})


def test_a_package_is_installed_once_and_found_again(tmp_path: Path, key: SigningKey) -> None:
    """Its modules lie in a folder of their own, without scripts; a second start uses them."""
    held, policy = HeldPackages(tmp_path), policy_of(key)
    manifest = held.keep(package(good_wheels(), key))
    folder = held.install(manifest, policy)
    assert {path.name for path in folder.glob("*.py")} == {"waves.py", "ripples.py"}
    stamp = folder.stat().st_mtime_ns
    again = HeldPackages(tmp_path)
    assert again.find(manifest.digest) == manifest
    assert again.install(manifest, policy) == folder
    assert folder.stat().st_mtime_ns == stamp
    held.set_current(manifest)
    assert again.current("waves") == manifest.digest


def test_a_kill_during_the_installation_leaves_nothing_that_counts(
    tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pip had written when the process died is removed, and the next start installs all of it."""
    held, policy = HeldPackages(tmp_path), policy_of(key)
    manifest, install = held.keep(package(good_wheels(), key)), module._install

    def die(wheels: list[Path], folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "torn.py").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_install", die)
    with pytest.raises(KeyboardInterrupt):
        held.install(manifest, policy)
    monkeypatch.setattr(module, "_install", install)
    folder = HeldPackages(tmp_path).install(manifest, policy)
    assert {path.name for path in folder.glob("*.py")} == {"waves.py", "ripples.py"}


def test_a_file_that_changed_since_it_came_is_not_installed(tmp_path: Path, key: SigningKey) -> None:
    """Another program wrote into the state directory: the bytes are checked once more."""
    held = HeldPackages(tmp_path)
    manifest = held.keep(package(good_wheels(), key))
    (path,) = (tmp_path / "packages").glob("*.package")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackageRefused, match="rule digest"):
        held.install(manifest, policy_of(key))
    assert held.find(manifest.digest) is None


def test_the_owner_decides_after_the_policy(tmp_path: Path, key: SigningKey) -> None:
    """Without signers nothing runs; with them an approval is needed, and a revocation removes the modules."""
    held, policy = HeldPackages(tmp_path), policy_of(key, approval=True)
    manifest = held.keep(package(good_wheels(), key))
    with pytest.raises(PackageRefused, match="rule signers"):
        held.allow(manifest, Policy())
    with pytest.raises(PackageRefused, match="rule approval"):
        held.install(manifest, policy)
    held.approve(manifest.digest)
    folder = held.install(manifest, policy)
    held.revoke(manifest.digest)
    assert not folder.exists()
    with pytest.raises(PackageRefused, match="rule revoked"):
        held.install(manifest, policy)
    held.approve(manifest.digest)
    assert held.install(manifest, policy) == folder
    with pytest.raises(PackageRefused, match="rule manifest"):
        held.keep(b"no package")
    assert [unpack(path.read_bytes())[0] for path in (tmp_path / "packages").glob("*.package")] == [manifest]
