"""Spare files: a round reuses the files of the last one, and none of their old bytes reappears."""

import errno
import os
from pathlib import Path

import pytest

from fl_server.store.spool import kept_files
from fl_server.store.spool.spool import Leftover, Spool, SpoolKey

KEY = SpoolKey("r1", 12, 0, "device-7")
DIGEST, OTHER = b"\xab" * 32, b"\xcd" * 32
DATA = bytes(range(256)) * 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of the spool."""
    return tmp_path / "spool"


@pytest.fixture
def spool(root: Path) -> Spool:
    """An empty spool."""
    return Spool(root)


def fill(spool: Spool, key: SpoolKey = KEY) -> Path:
    """Write a whole update of DATA."""
    part = spool.open_part(key, DIGEST, len(DATA))
    part.write(0, DATA)
    return part.seal()


def test_a_round_reuses_the_files_of_the_last_one(spool: Spool, root: Path) -> None:
    """The same file on disk without its old bytes. An upload of another size gets a new file."""
    old = fill(spool).stat().st_ino
    spool.remove_round("r1", 12)
    part = spool.open_part(KEY, OTHER, len(DATA))
    part.write(0, bytes(512))
    part.close()
    assert spool.kept(KEY, OTHER) == 512
    part = spool.open_part(KEY, OTHER, len(DATA))
    part.write(512, bytes(512))
    whole = part.seal()
    assert whole.stat().st_ino == old
    assert whole.read_bytes() == bytes(1024)
    spool.remove_round("r1", 12)
    part = spool.open_part(KEY, OTHER, len(DATA) + 1)
    assert part.path.stat().st_ino != old


def test_old_bytes_of_a_file_are_not_kept(spool: Spool, root: Path) -> None:
    """A process that dies before the first byte keeps nothing, although its file has bytes of the last round."""
    fill(spool)
    spool.remove_round("r1", 12)
    spool.open_part(KEY, DIGEST, len(DATA)).close()
    assert spool.kept(KEY, DIGEST) == 0
    assert Spool(root).sweep() == [Leftover(KEY, DIGEST, whole=False)]
    assert Spool(root).kept(KEY, DIGEST) == 0


def test_the_file_of_an_open_upload_is_not_reused(spool: Spool) -> None:
    """A late write into a removed round does not reach another update."""
    late = spool.open_part(KEY, DIGEST, len(DATA))
    spool.remove_round("r1", 12)
    whole = fill(spool, SpoolKey("r1", 13, 0, "b"))
    late.write(0, bytes(len(DATA)))
    assert whole.read_bytes() == DATA


def test_spare_files_are_removed_for_space(spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are removed before an upload is refused for lack of space, when a run ends, and at a start."""
    fallocate = os.posix_fallocate

    def refuse(file: int, offset: int, size: int) -> None:
        if list(root.glob("spare/*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(file, offset, size)

    def spare() -> None:
        fill(spool)
        spool.remove_round("r1", 12)
        assert len(list(root.glob("spare/*"))) == 1

    spare()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        spool.open_part(SpoolKey("r1", 13, 0, "b"), DIGEST, 2 * len(DATA)).close()
    assert not list(root.glob("spare/*"))
    spare()
    spool.remove_run("r2")
    assert not list(root.glob("spare/*"))
    spare()
    Spool(root)
    assert not list(root.glob("spare/*"))


def test_the_bytes_of_spare_files_are_limited(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large cohort only some files are kept, and at most the number of the last round."""
    monkeypatch.setattr(kept_files, "MOST_BYTES", 3 * len(DATA))
    spool = Spool(root)
    for round_, clients in ((1, "abcd"), (2, "ab")):
        for client in clients:
            fill(spool, SpoolKey("r1", round_, 0, client))
        spool.remove_round("r1", round_)
        assert len(list(root.glob("spare/*"))) == min(3, len(clients))


def test_a_file_that_cannot_be_kept_is_removed(spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files can be removed although the disk takes no new folder."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fill(spool)
    monkeypatch.setattr(kept_files, "make_folders", refuse)
    spool.remove_round("r1", 12)
    assert not [path for path in root.rglob("*") if path.is_file()]
