"""Spare files: a round is written over the updates of the last, and nothing of what stood there comes back."""

import errno
import os
from pathlib import Path

import pytest

from fl_server import spare_files, spool_parts
from fl_server.spool import Leftover, Spool, SpoolKey

KEY = SpoolKey("r1", 12, 0, "device-7")
DIGEST, OTHER = b"\xab" * 32, b"\xcd" * 32
DATA = bytes(range(256)) * 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the spool lies."""
    return tmp_path / "spool"


@pytest.fixture
def spool(root: Path) -> Spool:
    """An empty spool."""
    return Spool(root)


def fill(spool: Spool, key: SpoolKey = KEY) -> Path:
    """A whole update of DATA."""
    part = spool.open_part(key, DIGEST, len(DATA))
    part.write(0, DATA)
    return part.seal()


def test_a_round_is_written_over_the_files_of_the_last(spool: Spool, root: Path) -> None:
    """The same file on disk, with nothing of what stood in it; a resumed upload of another size gets one of its own."""
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


def test_what_stood_in_a_file_is_not_kept(spool: Spool, root: Path) -> None:
    """A process that dies before a byte came leaves nothing, though its file has bytes of the last round."""
    fill(spool)
    spool.remove_round("r1", 12)
    spool.open_part(KEY, DIGEST, len(DATA)).close()
    assert spool.kept(KEY, DIGEST) == 0
    assert Spool(root).sweep() == [Leftover(KEY, DIGEST, whole=False)]
    assert Spool(root).kept(KEY, DIGEST) == 0


def test_an_upload_under_way_is_no_spare(spool: Spool) -> None:
    """Whoever writes into a removed round writes into nobody's update."""
    late = spool.open_part(KEY, DIGEST, len(DATA))
    spool.remove_round("r1", 12)
    whole = fill(spool, SpoolKey("r1", 13, 0, "b"))
    late.write(0, bytes(len(DATA)))
    assert whole.read_bytes() == DATA


def test_spare_files_make_room(spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go before an upload is refused for want of room, when a run ends, and at a start."""
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
        patch.setattr(spool_parts.os, "posix_fallocate", refuse)
        spool.open_part(SpoolKey("r1", 13, 0, "b"), DIGEST, 2 * len(DATA)).close()
    assert not list(root.glob("spare/*"))
    spare()
    spool.remove_run("r2")
    assert not list(root.glob("spare/*"))
    spare()
    Spool(root)
    assert not list(root.glob("spare/*"))


def test_so_many_bytes_are_spare_at_most(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large cohort a part is kept, and of one size what the last round had."""
    monkeypatch.setattr(spare_files, "MOST_BYTES", 3 * len(DATA))
    spool = Spool(root)
    for round_, clients in ((1, "abcd"), (2, "ab")):
        for client in clients:
            fill(spool, SpoolKey("r1", round_, 0, client))
        spool.remove_round("r1", round_)
        assert len(list(root.glob("spare/*"))) == min(3, len(clients))


def test_what_cannot_be_kept_is_removed(spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no new folder must still be emptied."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fill(spool)
    monkeypatch.setattr(spare_files, "make_folders", refuse)
    spool.remove_round("r1", 12)
    assert not [path for path in root.rglob("*") if path.is_file()]
