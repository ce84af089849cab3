"""The spool: updates come in pieces, survive restarts, and are whole or not there."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_server import spool_parts
from fl_server.spool import Leftover, PartBusy, Spool, SpoolKey
from fl_server.store.base import StoreError, StoreFull
from protos.chunks import crc32c

KEY = SpoolKey("r1", 12, 0, "device-7")
DIGEST, OTHER = b"\xab" * 32, b"\xcd" * 32
DATA = bytes(range(256)) * 4

KILLED_WRITER = """
import os, signal, sys
from fl_server.spool import Spool, SpoolKey
part = Spool(sys.argv[1]).open_part(SpoolKey("r1", 12, 0, "device-7"), bytes([0xab]) * 32, 1024)
part.write(0, bytes(range(256)))
part.write(256, bytes(range(256)))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the spool lies."""
    return tmp_path / "spool"


@pytest.fixture
def spool(root: Path) -> Spool:
    """An empty spool."""
    return Spool(root)


def fill(spool: Spool, key: SpoolKey = KEY, digest: bytes = DIGEST) -> Path:
    """A whole update of DATA."""
    part = spool.open_part(key, digest, len(DATA))
    part.write(0, DATA)
    return part.seal()


def cut(spool: Spool, at: int = 512) -> None:
    """An upload of DATA in chunks of 256 bytes that broke off."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    for start in range(0, at, 256):
        part.write(start, DATA[start : start + 256])
    part.close()


def files(root: Path) -> list[str]:
    """Names of all files, sorted."""
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_an_update_is_written_and_read(spool: Spool, root: Path) -> None:
    """What is sealed is read back byte for byte, from the path that the digest names."""
    path = fill(spool)
    assert path == spool.path(KEY, DIGEST)
    assert path.read_bytes() == DATA
    assert files(root) == [f"device-7.{DIGEST.hex()}.update"]


def test_blocks_are_read_where_they_lie(spool: Spool) -> None:
    """A reducer reads any block, into memory of its own or into new bytes."""
    fill(spool)
    block = bytearray(10)
    with spool.open_for_reading(KEY, DIGEST) as update:
        update.read_into(300, memoryview(block))
        assert bytes(block) == DATA[300:310] == update.read(300, 10)
        assert update.size_bytes == 1024


def test_reading_over_the_end_is_an_error(spool: Spool) -> None:
    """A torn file is told, never filled up."""
    fill(spool)
    with spool.open_for_reading(KEY, DIGEST) as update, pytest.raises(StoreError, match="ends at 1024, 6 bytes short"):
        update.read(1020, 10)


def test_what_is_not_there_cannot_be_read(spool: Spool) -> None:
    """An upload under way is no update yet."""
    cut(spool)
    with pytest.raises(StoreError, match="could not open the update"):
        spool.open_for_reading(KEY, DIGEST)


def test_room_is_taken_before_bytes_come(spool: Spool, root: Path) -> None:
    """The part has its full size, on the disk too, from the start."""
    part = spool.open_part(KEY, DIGEST, 1 << 20)
    found = next(root.rglob("*.part")).stat()
    assert (found.st_size, found.st_blocks * 512 >= 1 << 20, part.kept_bytes) == (1 << 20, True, 0)
    part.discard()


def test_an_empty_update_can_be_sealed(spool: Spool) -> None:
    """No bytes are all the bytes there are."""
    assert spool.open_part(KEY, DIGEST, 0).seal().read_bytes() == b""


def test_an_upload_goes_on_where_it_was_cut(spool: Spool) -> None:
    """What was kept is not sent again."""
    cut(spool)
    assert spool.kept(KEY, DIGEST) == 512
    part = spool.open_part(KEY, DIGEST, len(DATA))
    assert part.kept_bytes == 512
    part.write(512, DATA[512:])
    assert part.seal().read_bytes() == DATA


def test_a_killed_process_keeps_its_chunks(root: Path) -> None:
    """After SIGKILL a new process goes on behind the last chunk that was written."""
    writer = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(root)], check=False)
    assert writer.returncode == -signal.SIGKILL
    spool = Spool(root)
    assert spool.kept(KEY, DIGEST) == 512
    with_rest = spool.open_part(KEY, DIGEST, len(DATA))
    with_rest.write(512, DATA[512:])
    assert with_rest.seal().read_bytes() == DATA


@pytest.mark.parametrize(("harmed", "kept"), [(0, 0), (255, 0), (256, 256), (700, 512)])
def test_a_torn_chunk_and_what_follows_is_sent_again(spool: Spool, root: Path, harmed: int, kept: int) -> None:
    """After a power cut a noted byte may be wrong: the prefix before its chunk of 256 bytes is kept."""
    cut(spool, at=768)
    with next(root.rglob("*.part")).open("r+b") as file:
        file.seek(harmed)
        file.write(bytes([DATA[harmed] ^ 1]))
    again = Spool(root)
    assert again.kept(KEY, DIGEST) == kept
    part = again.open_part(KEY, DIGEST, len(DATA))
    part.write(kept, DATA[kept:])
    assert part.seal().read_bytes() == DATA


def test_the_notes_have_the_checksums_of_the_wire(spool: Spool, root: Path) -> None:
    """CRC-32C, of which 32 zero bytes have 0x8A9136AA (RFC 3720, B.4), behind the chunk's end."""
    spool.open_part(KEY, DIGEST, 64).write(0, bytes(32))
    assert next(root.rglob("*.kept")).read_bytes().endswith((32).to_bytes(8, "little") + bytes.fromhex("aa36918a"))


def test_a_checksum_that_is_known_is_not_taken_again(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noted as it is; bytes of which some were kept already have another one."""
    part, known = spool.open_part(KEY, DIGEST, len(DATA)), crc32c(DATA[:300])
    with monkeypatch.context() as patch:
        patch.delattr(spool_parts, "crc32c")
        part.write(0, DATA[:300], known)
    part.write(200, DATA[200:600], crc32c(DATA[200:600]))
    part.close()
    assert spool.kept(KEY, DIGEST) == 600


@pytest.mark.parametrize("cut_off", [1, 11, 12, 13])
def test_torn_notes_cost_their_chunk_only(spool: Spool, root: Path, cut_off: int) -> None:
    """A note is 12 bytes: cutting up to 12 loses the second of two chunks, one more the first as well."""
    cut(spool)
    notes = next(root.rglob("*.kept"))
    notes.write_bytes(notes.read_bytes()[:-cut_off])
    assert Spool(root).kept(KEY, DIGEST) == (256 if cut_off <= 12 else 0)


def test_a_shortened_part_is_never_trusted(spool: Spool, root: Path) -> None:
    """A file that lost its end keeps the chunks that are whole, and its room is taken again."""
    cut(spool)
    os.truncate(next(root.rglob("*.part")), 300)
    part = Spool(root).open_part(KEY, DIGEST, len(DATA))
    assert part.kept_bytes == 256
    assert next(root.rglob("*.part")).stat().st_size == len(DATA)
    part.close()


@pytest.mark.parametrize(("digest", "size"), [(OTHER, len(DATA)), (DIGEST, 2000)], ids=["digest", "size"])
def test_another_update_starts_over(spool: Spool, digest: bytes, size: int) -> None:
    """Bytes of one update are never taken for another's, and only one unfinished upload of a key takes room."""
    cut(spool)
    part = spool.open_part(KEY, digest, size)
    assert part.kept_bytes == 0
    part.write(0, b"z" * size)
    assert part.seal().read_bytes() == b"z" * size
    assert spool.kept(KEY, OTHER) == (size if digest == OTHER else 0)


def test_a_repeated_chunk_is_passed_over(spool: Spool) -> None:
    """After a cut the sender may begin before the offset kept: only what is new is written."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:300])
    part.write(0, DATA[:200])
    part.write(256, DATA[256:])
    assert part.kept_bytes == len(DATA)
    assert part.seal().read_bytes() == DATA


@pytest.mark.parametrize(
    ("offset", "message"),
    [(11, "leaves a gap: go on at 10"), (10, "over the update's 1024 bytes"), (-1, "leaves a gap")],
)
def test_a_chunk_out_of_place_is_refused(spool: Spool, offset: int, message: str) -> None:
    """Neither a gap nor bytes over the size are written, and what is kept stays."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:10])
    with pytest.raises(ValueError, match=message):
        part.write(offset, DATA)
    assert part.kept_bytes == 10
    part.close()


def test_an_unfinished_upload_is_not_sealed(spool: Spool, root: Path) -> None:
    """The update would be torn."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    with pytest.raises(ValueError, match="0 of 1024 bytes: send the rest"):
        part.seal()
    part.discard()
    assert files(root) == []


def test_kept_bytes_can_be_read_for_their_digest(spool: Spool) -> None:
    """The digest of a resumed upload begins with what was kept; bytes not kept are not given out."""
    cut(spool)
    part = spool.open_part(KEY, DIGEST, len(DATA))
    assert part.read(0, 4096) == DATA[:512]
    assert part.read(500, 4) == DATA[500:504]
    assert part.read(600, 4) == b""
    part.close()


def test_a_part_tells_where_its_bytes_lie(spool: Spool) -> None:
    """The checks before sealing read the part; opened again after sealing, the whole update."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    assert part.path.read_bytes() == DATA
    path = part.seal()
    again = spool.open_part(KEY, DIGEST, len(DATA))
    assert again.path == path
    again.close()


def test_an_upload_has_one_writer(spool: Spool) -> None:
    """A second stream must wait until the first is closed; another client need not."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:5])
    with pytest.raises(PartBusy, match="close that one first"):
        spool.open_part(KEY, DIGEST, len(DATA))
    assert (spool.kept(KEY, DIGEST), spool.kept(KEY, OTHER)) == (5, 0)
    fill(spool, SpoolKey("r1", 12, 0, "device-8"))
    part.close()
    spool.open_part(KEY, DIGEST, len(DATA)).close()


def test_a_closed_upload_takes_no_more(spool: Spool) -> None:
    """A stream whose place was given away cannot write into its successor's file."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.close()
    part.close()
    with pytest.raises(StoreError, match="is closed: open it again"):
        part.write(0, DATA)


def test_a_sealed_update_can_be_opened_again(spool: Spool) -> None:
    """A process that was killed between sealing and the ledger finds all bytes kept, checks and seals again."""
    path = fill(spool)
    part = spool.open_part(KEY, DIGEST, len(DATA))
    assert (part.kept_bytes, spool.kept(KEY, DIGEST)) == (len(DATA), len(DATA))
    assert part.read(0, len(DATA)) == DATA
    assert part.seal() == path
    assert path.read_bytes() == DATA


def test_a_sealed_update_that_proves_bad_is_discarded(spool: Spool, root: Path) -> None:
    """Its digest did not hold: nothing of it is left, and it can be sent again."""
    fill(spool)
    spool.open_part(KEY, DIGEST, len(DATA)).discard()
    assert files(root) == []
    assert fill(spool).read_bytes() == DATA


def test_removing_is_by_update_round_and_run(spool: Spool, root: Path) -> None:
    """Each takes what it names and leaves the rest; twice is no error."""
    others = [SpoolKey("r1", 12, 1, "b"), SpoolKey("r1", 13, 0, "c"), SpoolKey("r2", 12, 0, "d")]
    for key in (KEY, *others):
        fill(spool, key)
    left = []
    for remove in (
        lambda: spool.remove(KEY, DIGEST),
        lambda: spool.remove_round("r1", 12),
        lambda: spool.remove_run("r1"),
    ):
        remove()
        remove()
        left.append([path.name[0] for path in sorted(root.glob("run-*/*/*/*"))])
    assert left == [["b", "c", "d"], ["c", "d"], ["d"]]


def test_a_sweep_lists_what_a_restart_finds(spool: Spool, root: Path) -> None:
    """Whole updates and uploads under way are told; a part without notes and notes without a part are removed."""
    whole = SpoolKey("r2", 3, 1, "a.part")
    fill(spool, whole, OTHER)
    cut(spool)
    folder = spool.path(KEY, DIGEST).parent
    for orphan in ("x.part", "y.kept", "stranger"):
        (folder / orphan).touch()
    assert Spool(root).sweep() == [Leftover(KEY, DIGEST, whole=False), Leftover(whole, OTHER, whole=True)]
    assert [path.name for path in sorted(folder.iterdir())] == ["device-7.kept", "device-7.part", "stranger"]
    assert spool.kept(KEY, DIGEST) == 512


def test_dots_in_names_stay_inside(spool: Spool, root: Path) -> None:
    """Names of allowed characters that mean something to a file system are harmless."""
    path = fill(spool, SpoolKey("..", 0, 0, ".."))
    assert path.resolve().is_relative_to(root.resolve() / "run-.." / "round-000000")


@pytest.mark.parametrize(
    "key",
    [
        SpoolKey("a/b", 0, 0, "c"), SpoolKey("", 0, 0, "c"), SpoolKey("a", 0, 0, "../c"), SpoolKey("a", 0, 0, "x" * 65),
        SpoolKey("a", -1, 0, "c"), SpoolKey("a", 0, -1, "c"), SpoolKey("a", 0, 0, "c\0"),
    ],
)  # fmt: skip
def test_a_name_that_could_leave_is_refused(spool: Spool, root: Path, key: SpoolKey) -> None:
    """Names come from outside: those that are no plain names make no path."""
    with pytest.raises(StoreError, match="1 to 64 of the characters|0 or more"):
        spool.open_part(key, DIGEST, 1)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "ftruncate", "open"])
def test_no_room_at_the_start_leaves_nothing(
    spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A full disk is known before bytes come; the part is removed, and the key is free for a retry."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool_parts.os, call, refuse)
        with pytest.raises(StoreFull, match="No space left on device; make room"):
            spool.open_part(KEY, DIGEST, len(DATA))
    assert files(root) == []
    assert fill(spool).read_bytes() == DATA


@pytest.mark.parametrize("at", [0, 1], ids=["bytes", "note"])
def test_no_room_for_a_chunk_keeps_what_came(spool: Spool, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Whether the chunk or its note finds no room, what was kept before stays, and the same chunk can be sent again."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:256])
    pwrite, calls = os.pwrite, iter(range(100))

    def refuse(file: int, data: bytes, offset: int) -> int:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(spool_parts.os, "pwrite", refuse)
        with pytest.raises(StoreFull):
            part.write(256, DATA[256:])
    assert part.kept_bytes == 256
    part.write(256, DATA[256:])
    assert part.seal().read_bytes() == DATA


def test_short_writes_go_on(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take fewer bytes than it is given."""
    pwrite = os.pwrite
    monkeypatch.setattr(spool_parts.os, "pwrite", lambda file, data, offset: pwrite(file, data[:100], offset))
    assert fill(spool).read_bytes() == DATA


def test_a_file_system_without_preallocation_will_do(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where room cannot be taken ahead the file is only given its size."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(spool_parts.os, "posix_fallocate", refuse)
    assert fill(spool).read_bytes() == DATA


@pytest.mark.parametrize(("durability", "count"), [("process", 0), ("power", 2)])
def test_sealing_is_fsynced_where_power_may_fail(
    root: Path, monkeypatch: pytest.MonkeyPatch, durability: str, count: int
) -> None:
    """With "power" the file, then the name in its folder; with "process" neither."""
    spool = Spool(root, durability)  # type: ignore[arg-type]
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    part.seal()
    assert len(synced) == count


def test_sealing_can_be_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in the folder could not be made durable: the second try does it, and the update is whole."""
    part = Spool(root, "power").open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool_parts, "fsync_path", refuse)
        with pytest.raises(StoreFull, match="could not seal"):
            part.seal()
    assert part.seal().read_bytes() == DATA


def test_a_removed_round_cannot_be_sealed_into(spool: Spool) -> None:
    """An upload that was open while its round was removed is told so, and can be discarded."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    spool.remove_round("r1", 12)
    with pytest.raises(StoreError, match="could not seal"):
        part.seal()
    part.discard()
