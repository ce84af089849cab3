"""The spool: updates arrive in pieces, survive restarts, and are complete or absent."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_server.store.errors import Durability, StoreError, StoreFull
from fl_server.store.spool import part_file as spool_parts
from fl_server.store.spool.part_file import PartBusy
from fl_server.store.spool.spool import Leftover, Spool, SpoolKey
from protos.chunks import crc32c

KEY = SpoolKey("r1", 12, 0, "device-7")
DIGEST, OTHER = b"\xab" * 32, b"\xcd" * 32
DATA = bytes(range(256)) * 4

KILLED_WRITER = """
import os, signal, sys
from fl_server.store.spool.spool import Spool, SpoolKey
part = Spool(sys.argv[1]).open_part(SpoolKey("r1", 12, 0, "device-7"), bytes([0xab]) * 32, 1024)
part.write(0, bytes(range(256)))
part.write(256, bytes(range(256)))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of the spool."""
    return tmp_path / "spool"


@pytest.fixture
def spool(root: Path) -> Spool:
    """An empty spool."""
    return Spool(root)


def fill(spool: Spool, key: SpoolKey = KEY, digest: bytes = DIGEST) -> Path:
    """Write a whole update of DATA."""
    part = spool.open_part(key, digest, len(DATA))
    part.write(0, DATA)
    return part.seal()


def interrupted_upload(spool: Spool, at: int = 512) -> None:
    """Write the first `at` bytes of DATA in chunks of 256, and close the upload."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    for start in range(0, at, 256):
        part.write(start, DATA[start : start + 256])
    part.close()


def files(root: Path) -> list[str]:
    """Names of all files, sorted."""
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_an_update_is_written_and_read(spool: Spool, root: Path) -> None:
    """A sealed update is read byte for byte from the path with its digest."""
    path = fill(spool)
    assert path == spool.path(KEY, DIGEST)
    assert path.read_bytes() == DATA
    assert files(root) == [f"device-7.{DIGEST.hex()}.update"]


def test_space_is_allocated_before_bytes_arrive(spool: Spool, root: Path) -> None:
    """The part has its full size from the start, also on the disk."""
    part = spool.open_part(KEY, DIGEST, 1 << 20)
    found = next(root.rglob("*.part")).stat()
    assert (found.st_size, found.st_blocks * 512 >= 1 << 20, part.kept_bytes) == (1 << 20, True, 0)
    part.discard()


def test_an_empty_update_can_be_sealed(spool: Spool) -> None:
    """An update of 0 bytes is complete."""
    assert spool.open_part(KEY, DIGEST, 0).seal().read_bytes() == b""


def test_an_upload_resumes_where_it_was_interrupted(spool: Spool) -> None:
    """Kept bytes are not sent again."""
    interrupted_upload(spool)
    assert spool.kept(KEY, DIGEST) == 512
    part = spool.open_part(KEY, DIGEST, len(DATA))
    assert part.kept_bytes == 512
    part.write(512, DATA[512:])
    assert part.seal().read_bytes() == DATA


def test_a_killed_process_keeps_its_chunks(root: Path) -> None:
    """After SIGKILL a new process resumes after the last written chunk."""
    writer = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(root)], check=False)
    assert writer.returncode == -signal.SIGKILL
    spool = Spool(root)
    assert spool.kept(KEY, DIGEST) == 512
    with_rest = spool.open_part(KEY, DIGEST, len(DATA))
    with_rest.write(512, DATA[512:])
    assert with_rest.seal().read_bytes() == DATA


@pytest.mark.parametrize(("damaged", "kept"), [(0, 0), (255, 0), (256, 256), (700, 512)])
def test_a_torn_chunk_and_all_after_it_are_sent_again(spool: Spool, root: Path, damaged: int, kept: int) -> None:
    """After a power cut a kept byte may be wrong: only the chunks of 256 bytes before it are kept."""
    interrupted_upload(spool, at=768)
    with next(root.rglob("*.part")).open("r+b") as file:
        file.seek(damaged)
        file.write(bytes([DATA[damaged] ^ 1]))
    again = Spool(root)
    assert again.kept(KEY, DIGEST) == kept
    part = again.open_part(KEY, DIGEST, len(DATA))
    part.write(kept, DATA[kept:])
    assert part.seal().read_bytes() == DATA


def test_the_notes_have_the_checksums_of_the_wire(spool: Spool, root: Path) -> None:
    """The end of the chunk and its CRC-32C; that of 32 zero bytes is 0x8A9136AA (RFC 3720, B.4)."""
    spool.open_part(KEY, DIGEST, 64).write(0, bytes(32))
    assert next(root.rglob("*.kept")).read_bytes().endswith((32).to_bytes(8, "little") + bytes.fromhex("aa36918a"))


def test_a_known_checksum_is_not_computed_again(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written as given, unless some of the bytes were kept before."""
    part, known = spool.open_part(KEY, DIGEST, len(DATA)), crc32c(DATA[:300])
    with monkeypatch.context() as patch:
        patch.delattr(spool_parts, "crc32c")
        part.write(0, DATA[:300], known)
    part.write(200, DATA[200:600], crc32c(DATA[200:600]))
    part.close()
    assert spool.kept(KEY, DIGEST) == 600


@pytest.mark.parametrize("cut_off", [1, 11, 12, 13])
def test_a_torn_note_loses_only_its_chunk(spool: Spool, root: Path, cut_off: int) -> None:
    """A note is 12 bytes: without the last 12 the second of two chunks is lost, without 13 the first one too."""
    interrupted_upload(spool)
    notes = next(root.rglob("*.kept"))
    notes.write_bytes(notes.read_bytes()[:-cut_off])
    assert Spool(root).kept(KEY, DIGEST) == (256 if cut_off <= 12 else 0)


def test_a_shortened_part_is_never_trusted(spool: Spool, root: Path) -> None:
    """A file that lost its end keeps its whole chunks, and its space is allocated again."""
    interrupted_upload(spool)
    os.truncate(next(root.rglob("*.part")), 300)
    part = Spool(root).open_part(KEY, DIGEST, len(DATA))
    assert part.kept_bytes == 256
    assert next(root.rglob("*.part")).stat().st_size == len(DATA)
    part.close()


@pytest.mark.parametrize(("digest", "size"), [(OTHER, len(DATA)), (DIGEST, 2000)], ids=["digest", "size"])
def test_another_update_starts_over(spool: Spool, digest: bytes, size: int) -> None:
    """Bytes of one update are never used for another, and each key has one unfinished upload."""
    interrupted_upload(spool)
    part = spool.open_part(KEY, digest, size)
    assert part.kept_bytes == 0
    part.write(0, b"z" * size)
    assert part.seal().read_bytes() == b"z" * size
    assert spool.kept(KEY, OTHER) == (size if digest == OTHER else 0)


def test_repeated_bytes_are_ignored(spool: Spool) -> None:
    """The sender may resume before the kept offset: only new bytes are written."""
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
    """Neither a gap nor bytes beyond the size are written, and kept bytes stay."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:10])
    with pytest.raises(ValueError, match=message):
        part.write(offset, DATA)
    assert part.kept_bytes == 10
    part.close()


def test_an_unfinished_upload_is_not_sealed(spool: Spool, root: Path) -> None:
    """Its update would be incomplete."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    with pytest.raises(ValueError, match="0 of 1024 bytes: send the rest"):
        part.seal()
    part.discard()
    assert files(root) == []


def test_a_part_has_the_path_of_its_bytes(spool: Spool) -> None:
    """Before sealing it is the part, which the checks read. Opened again after sealing, it is the whole update."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    assert part.path.read_bytes() == DATA
    path = part.seal()
    again = spool.open_part(KEY, DIGEST, len(DATA))
    assert again.path == path
    again.close()


def test_an_upload_has_one_writer(spool: Spool) -> None:
    """A second stream must wait until the first is closed. Other clients are independent."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:5])
    with pytest.raises(PartBusy, match="close that one first"):
        spool.open_part(KEY, DIGEST, len(DATA))
    assert (spool.kept(KEY, DIGEST), spool.kept(KEY, OTHER)) == (5, 0)
    fill(spool, SpoolKey("r1", 12, 0, "device-8"))
    part.close()
    spool.open_part(KEY, DIGEST, len(DATA)).close()


def test_a_closed_upload_cannot_be_written(spool: Spool) -> None:
    """A replaced stream cannot write into the file of its successor."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.close()
    part.close()
    with pytest.raises(StoreError, match="is closed: open it again"):
        part.write(0, DATA)


def test_a_sealed_update_can_be_opened_again(spool: Spool) -> None:
    """A process that was killed between sealing and the ledger's record can check and seal it again."""
    path = fill(spool)
    part = spool.open_part(KEY, DIGEST, len(DATA))
    assert (part.kept_bytes, spool.kept(KEY, DIGEST)) == (len(DATA), len(DATA))
    assert part.path.read_bytes() == DATA
    assert part.seal() == path
    assert path.read_bytes() == DATA


def test_a_bad_sealed_update_can_be_discarded(spool: Spool, root: Path) -> None:
    """If its digest is wrong, its files are removed and it can be sent again."""
    fill(spool)
    spool.open_part(KEY, DIGEST, len(DATA)).discard()
    assert files(root) == []
    assert fill(spool).read_bytes() == DATA


def test_a_round_or_a_run_can_be_removed(spool: Spool, root: Path) -> None:
    """Everything else stays. Removing twice is no error."""
    others = [SpoolKey("r1", 12, 1, "b"), SpoolKey("r1", 13, 0, "c"), SpoolKey("r2", 12, 0, "d")]
    for key in (KEY, *others):
        fill(spool, key)
    left = []
    removals: list[Callable[[], None]] = [lambda: spool.remove_round("r1", 12), lambda: spool.remove_run("r1")]
    for remove in removals:
        remove()
        remove()
        left.append([path.name[0] for path in sorted(root.glob("run-*/*/*/*"))])
    assert left == [["c", "d"], ["d"]]


@pytest.mark.parametrize("open_", [Spool.open_part, Spool.reserve])
def test_an_upload_that_waited_past_the_end_of_its_run_leaves_no_file(
    spool: Spool, root: Path, open_: Callable[..., object]
) -> None:
    """The run's files were removed before the upload's place was made, and nobody else would remove that."""

    def is_over() -> bool:
        assert list(root.glob("run-r1/*/*"))  # the place is made
        return True

    with pytest.raises(StoreError, match="a run that is over"):
        open_(spool, KEY, DIGEST, len(DATA), is_over)
    assert not [path for path in root.rglob("*") if "r1" in path.name or path.is_file()]
    spool.open_part(KEY, DIGEST, len(DATA)).close()  # the run has been extended


def test_a_sweep_lists_the_updates_on_disk(spool: Spool, root: Path) -> None:
    """It returns whole updates and unfinished uploads. It removes a part without notes, and notes without a part."""
    whole = SpoolKey("r2", 3, 1, "a.part")
    fill(spool, whole, OTHER)
    interrupted_upload(spool)
    folder = spool.path(KEY, DIGEST).parent
    for orphan in ("x.part", "y.kept", "stranger"):
        (folder / orphan).touch()
    assert Spool(root).sweep() == [Leftover(KEY, DIGEST, whole=False), Leftover(whole, OTHER, whole=True)]
    assert [path.name for path in sorted(folder.iterdir())] == ["device-7.kept", "device-7.part", "stranger"]
    assert spool.kept(KEY, DIGEST) == 512


def test_names_of_dots_stay_inside_the_spool(spool: Spool, root: Path) -> None:
    """They are allowed names with a meaning to file systems, and harmless."""
    path = fill(spool, SpoolKey("..", 0, 0, ".."))
    assert path.resolve().is_relative_to(root.resolve() / "run-.." / "round-000000")


@pytest.mark.parametrize(
    "key",
    [
        SpoolKey("a/b", 0, 0, "c"), SpoolKey("", 0, 0, "c"), SpoolKey("a", 0, 0, "../c"), SpoolKey("a", 0, 0, "x" * 65),
        SpoolKey("a", -1, 0, "c"), SpoolKey("a", 0, -1, "c"), SpoolKey("a", 0, 0, "c\0"),
    ],
)  # fmt: skip
def test_a_name_that_could_leave_the_spool_is_refused(spool: Spool, root: Path, key: SpoolKey) -> None:
    """Names are external input: only plain names become paths."""
    with pytest.raises(StoreError, match="1 to 64 of the characters|0 or more"):
        spool.open_part(key, DIGEST, 1)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "ftruncate", "open"])
def test_a_full_disk_at_the_start_leaves_nothing(
    spool: Spool, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is detected before bytes arrive. The part is removed, and the key is free for a retry."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StoreFull, match="No space left on device; make room"):
            spool.open_part(KEY, DIGEST, len(DATA))
    assert files(root) == []
    assert fill(spool).read_bytes() == DATA


@pytest.mark.parametrize("at", [0, 1], ids=["bytes", "note"])
def test_a_full_disk_during_a_chunk_keeps_earlier_chunks(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """There is no space for the chunk or for its note: kept bytes stay, and the chunk can be sent again."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:256])
    pwrite, calls = os.pwrite, iter(range(100))

    def refuse(file: int, data: bytes, offset: int) -> int:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(StoreFull):
            part.write(256, DATA[256:])
    assert part.kept_bytes == 256
    part.write(256, DATA[256:])
    assert part.seal().read_bytes() == DATA


def test_short_writes_are_continued(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write fewer bytes than given."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:100], offset))
    assert fill(spool).read_bytes() == DATA


def test_a_file_system_without_preallocation_works(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If space cannot be allocated, the file only gets its size."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert fill(spool).read_bytes() == DATA


@pytest.mark.parametrize(("durability", "count"), [("process", 0), ("power", 2)])
def test_sealing_is_fsynced_with_durability_power(
    root: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, count: int
) -> None:
    """With "power" the file and its folder are fsynced; with "process" neither."""
    spool = Spool(root, durability)
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    part.seal()
    assert len(synced) == count


def test_sealing_can_be_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder could not be fsynced: the second try does it, and the update is complete."""
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
    """Sealing an upload of a removed round is an error, and the upload can be discarded."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    spool.remove_round("r1", 12)
    with pytest.raises(StoreError, match="could not seal"):
        part.seal()
    part.discard()
