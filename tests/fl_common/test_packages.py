"""A package is pinned, signed whole and in parts, and none of its files can do anything outside of its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_common.packages import PackageRefused, check_signers, check_wheels, pack, unpack
from fl_common.signatures import make_key
from tests.processes.wheels import good_wheels, package, wheel

RECORD = "sha256=" + "A" * 43
HOSTILE = {
    "parent": (wheel("evil", {"../outside.py": ""}), "paths"),
    "absolute": (wheel("evil", {"/etc/outside.py": ""}), "paths"),
    "backslash": (wheel("evil", {"a\\..\\b.py": ""}), "paths"),
    "drive": (wheel("evil", {"C:/b.py": ""}), "paths"),
    "dot": (wheel("evil", {"a/./b.py": ""}), "paths"),
    "link": (wheel("evil", {"link": "/etc/passwd"}, links=["link"]), "paths"),
    "case": (wheel("evil", {"a.py": "", "A.py": ""}), "paths"),
    "pth": (wheel("evil", {"evil.pth": "import os"}), "start"),
    "deep_pth": (wheel("evil", {"evil/evil.PTH": "import os"}), "start"),
    "sitecustomize": (wheel("evil", {"sitecustomize.py": "import os"}), "start"),
    "scripts": (wheel("evil", {"evil-1.0.data/scripts/python": "#!python"}), "data"),
    "data": (wheel("evil", {"evil-1.0.data/data/etc/passwd": "root"}), "data"),
    "changed": (wheel("evil", {"evil.py": "a = 1"}, record={"evil.py": RECORD}), "record"),
    "unlisted": (wheel("evil", {"evil.py": ""}, record={"gone.py": RECORD}), "record"),
    "undigested": (wheel("evil", {"evil.py": ""}, record={"evil.py": ""}), "record"),
    "name": (("other-1.0-py3-none-any.whl", wheel("evil", {})[1]), "wheel"),
    "source": (("evil-1.0-py3-none-any.whl", b"no archive"), "wheel"),
}


def test_a_package_is_read_as_it_was_made(tmp_path: Path) -> None:
    """The first wheel names it, and its digest is that of every byte."""
    key = make_key(tmp_path / "key.pem")
    made = pack(good_wheels(), key)
    manifest, wheels = unpack(made)
    check_signers(manifest, [key.signer])
    check_wheels(manifest, wheels)
    assert (manifest.name, manifest.version, len(wheels)) == ("waves", "1.0", 2)
    other = unpack(pack([good_wheels()[0]], key))[0]
    assert other.digest != manifest.digest
    for place in (len(made) - 1, made.index(b"\n") + 1):
        changed = bytearray(made)
        changed[place] ^= 1
        with pytest.raises(PackageRefused, match="the rule digest"):
            unpack(bytes(changed))


@pytest.mark.parametrize("name", HOSTILE)
def test_wheels_that_reach_out_are_refused(tmp_path: Path, name: str) -> None:
    """The refusal names the rule, the signer and the digest. The command that signs refuses them, too."""
    key, (hostile, rule) = make_key(tmp_path / "key.pem"), HOSTILE[name]
    manifest, wheels = unpack(package([hostile], key))
    with pytest.raises(PackageRefused) as refused:
        check_wheels(manifest, wheels)
    assert refused.value.rule == rule
    assert manifest.digest in str(refused.value)
    assert key.signer in str(refused.value)
    with pytest.raises(PackageRefused):
        pack([hostile], key)


def test_one_wheel_cannot_replace_a_file_of_another(tmp_path: Path) -> None:
    """A dependency with a module of the task's name is refused."""
    key = make_key(tmp_path / "key.pem")
    task, _ = good_wheels()
    with pytest.raises(PackageRefused, match="rule overwrite"):
        pack([task, wheel("ripples", {"waves.py": "evil = True"})], key)


def test_signatures_are_of_one_package_by_named_keys(tmp_path: Path) -> None:
    """Refused are other signers, a dependency swapped for another signed one, and a signature of something else."""
    key, other = make_key(tmp_path / "key.pem"), make_key(tmp_path / "other.pem")
    task, dependency = good_wheels()
    swapped = wheel("ripples", {"ripples.py": "evil = True"})
    whole = unpack(package([task, dependency], key))[0]
    forged = json.loads(package([task, swapped], key).partition(b"\n")[0]) | {"signature": whole.signature}
    cases = {
        "foreign": (package([task, dependency], other), "signers"),
        "foreign part": (package([task, dependency], other, whole_by=key), "signers"),
        "swapped": (json.dumps(forged).encode() + b"\n" + task[1] + swapped[1], "signature"),
    }
    for data, rule in cases.values():
        manifest, _ = unpack(data)
        with pytest.raises(PackageRefused) as refused:
            check_signers(manifest, [key.signer])
        assert refused.value.rule == rule
    with pytest.raises(PackageRefused, match="by one of none"):
        check_signers(whole, [])


@pytest.mark.parametrize("data", [b"", b"{}\n", b"[]\n", b"\xff\n", b"x" * (1 << 17), b'{"name": "../x"}\n'])
def test_files_that_are_no_package_are_refused(data: bytes) -> None:
    """Whatever the bytes are, the refusal says what was expected."""
    with pytest.raises(PackageRefused, match="rule manifest"):
        unpack(data)


def test_sources_are_no_wheels(tmp_path: Path) -> None:
    """What would run a build when it is installed has no place in a package."""
    key = make_key(tmp_path / "key.pem")
    with pytest.raises(ValueError, match="file name of a wheel, got 'evil-1.0.tar.gz'"):
        pack([("evil-1.0.tar.gz", b"setup.py")], key)
    named = package(good_wheels(), key).replace(b"ripples-1.0-py3-none-any.whl", b"ripples-1.0.tar.gz")
    with pytest.raises(PackageRefused, match="rule manifest"):
        unpack(named)
