"""Spool and checkpoints with an object store: what counts, what a new machine finds, and what is removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from fl_server.store.checkpoints import Checkpoint, Checkpoints
from fl_server.store.database.store import open_sqlite
from fl_server.store.database.transactions import Home
from fl_server.store.errors import StoreError, StoreTakenOver, StoreUnavailable
from fl_server.store.ledger import Ledger
from fl_server.store.objects import files as files_module
from fl_server.store.objects.bucket import Bucket, DamagedObject
from fl_server.store.objects.files import StoredFiles
from fl_server.store.objects.local_cache import LocalCache
from fl_server.store.spool.part_file import StoredUpdate
from fl_server.store.spool.spool import Leftover, Spool, SpoolKey
from fl_server.store.uploaded_models import ReleaseFiles

PART = 64
"""Bytes of a part in these tests."""
DATA = bytes(range(256)) + b"the end"
DIGEST = blake3(DATA).digest()
KEY = SpoolKey("r1", 12, 0, "device-7")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "PART_BYTES", PART)


class Machine:
    """A coordinator's stores on one machine."""

    def __init__(self, bucket: Bucket, folder: Path, ledger: Path, cache_bytes: int = 1 << 20) -> None:
        folder.mkdir(exist_ok=True)
        self.ledger = Ledger(open_sqlite(ledger, home=Home("", storage=bucket.url)))
        self.files = StoredFiles(bucket, self.ledger, folder, LocalCache(cache_bytes))
        self.spool = Spool(folder / "spool", files=self.files)
        self.checkpoints = Checkpoints(folder / "checkpoints", files=self.files)
        self.folder = folder

    def close(self) -> None:
        """End as a killed process does: nothing is finished."""
        self.files.close()
        self.ledger.close()

    def admit(self, key: SpoolKey = KEY, data: bytes = DATA) -> bytes:
        """Receive a whole update. Returns its digest."""
        digest = blake3(data).digest()
        part = self.spool.open_part(key, digest, len(data))
        part.write(part.kept_bytes, data[part.kept_bytes :])
        part.seal()
        return digest


class Machines:
    """Machines one after the other, on one ledger and one object store."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.bucket, self._folder = bucket, folder
        self._open: list[Machine] = []

    def start(self, name: str = "one", cache_bytes: int = 1 << 20) -> Machine:
        """Start on a machine; the one before is killed."""
        self.kill()
        self._open.append(Machine(self.bucket, self._folder / name, self._folder / "ledger.sqlite", cache_bytes))
        return self._open[-1]

    def kill(self) -> None:
        """Kill the latest one."""
        while self._open:
            self._open.pop().close()

    def objects(self) -> list[str]:
        """The keys of all objects, without the ledger's id."""
        return sorted(key.partition("/")[2] for key, _ in self.bucket.keys(""))


@pytest.fixture
def machines(bucket: Bucket, tmp_path: Path) -> Iterator[Machines]:
    """Machines for each kind of object store."""
    made = Machines(bucket, tmp_path)
    yield made
    made.kill()


def test_an_update_is_whole_on_another_machine(machines: Machines) -> None:
    """What was sealed on a machine that is gone is read on the next one, by ranges."""
    machines.start("one").admit()
    two = machines.start("two")
    assert two.spool.sweep() == [Leftover(KEY, DIGEST, whole=True)]
    assert two.spool.is_whole(KEY, DIGEST)
    source = two.spool.source(KEY, DIGEST)
    assert isinstance(source, StoredUpdate)
    assert (source.read(0, len(DATA)), source.read(60, 10), source.read(256, 99)) == (DATA, DATA[60:70], b"the end")
    assert two.spool.kept(KEY, DIGEST) == len(DATA)
    assert two.admit() == DIGEST
    assert two.spool.path(KEY, DIGEST).read_bytes() == DATA


def test_an_upload_continues_behind_the_last_whole_part_on_another_machine(machines: Machines) -> None:
    """And on the same machine behind the last chunk."""
    one = machines.start("one")
    part = one.spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[: 2 * PART + 10])
    wait(part.sending)
    part.close()
    assert machines.start("one").spool.kept(KEY, DIGEST) == 2 * PART + 10
    two = machines.start("two")
    assert two.spool.sweep() == [Leftover(KEY, DIGEST, whole=False)]
    assert two.spool.kept(KEY, DIGEST) == 2 * PART
    part = two.spool.open_part(KEY, DIGEST, len(DATA))
    assert part.kept_bytes == 2 * PART
    part.write(2 * PART, DATA[2 * PART :])
    assert part.seal().read_bytes() == DATA
    assert len(machines.objects()) == -(-len(DATA) // PART)
    two.spool.path(KEY, DIGEST).unlink()
    source = two.spool.source(KEY, DIGEST)
    assert isinstance(source, StoredUpdate)
    assert source.read(0, len(DATA)) == DATA


def test_a_round_leaves_no_object(machines: Machines) -> None:
    """Sealed updates, unfinished ones and those with a wrong digest go; other rounds stay."""
    one = machines.start()
    one.admit()
    one.admit(SpoolKey("r1", 13, 0, "device-7"))
    one.spool.open_part(SpoolKey("r1", 12, 0, "b"), DIGEST, len(DATA)).write(0, DATA[:200])
    torn = one.spool.open_part(SpoolKey("r1", 12, 0, "c"), DIGEST, len(DATA))
    torn.write(0, DATA[::-1])
    torn.discard()
    one.files._pool.shutdown()
    one.spool.remove_round("r1", 12)
    before = len(machines.objects())
    assert before > 10  # removals are written first and done later
    assert not one.files.remove_objects()
    assert {key.rpartition("/")[0] for key in machines.objects()} == {
        f"spool/run-r1/round-000013/exchange-0/device-7.{DIGEST.hex()}.update"
    }


def test_a_removal_that_a_kill_cut_short_is_done_by_the_next_one(machines: Machines) -> None:
    """Also where objects of the same name were put in between."""
    one = machines.start("one")
    one.admit()
    one.spool.remove_run("r1")
    one.admit()
    two = machines.start("two")
    two.files.remove_objects()
    assert two.spool.is_whole(KEY, DIGEST)
    assert len(machines.objects()) == -(-len(DATA) // PART)


def test_a_part_that_is_not_needed_goes_later_if_the_ledger_is_away(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part whose answer was lost is there twice, and the ledger is away when the file counts with one of them."""
    one = machines.start("one")
    part = one.spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA[:PART])
    wait(part.sending)
    [first] = machines.objects()
    machines.bucket.put(f"{one.files.root}/{first.replace('00000.', '00000.0')}", DATA[:PART])
    two = machines.start("two")

    def away(*_: object) -> None:
        raise StoreUnavailable("the ledger is away")

    with monkeypatch.context() as patch:
        patch.setattr(two.ledger.store, "remove_stored_files", away)
        part = two.spool.open_part(KEY, DIGEST, len(DATA))
        part.write(PART, DATA[PART:])
        with pytest.raises(StoreUnavailable):
            part.seal()
        part.close()
    two.admit()
    two.spool.remove_run("r1")
    two.files.remove_objects()
    assert machines.objects() == []


def test_another_update_of_a_client_replaces_its_unfinished_one(machines: Machines) -> None:
    """No client fills the store with beginnings of updates."""
    one = machines.start()
    part = one.spool.open_part(KEY, b"o" * 32, len(DATA))
    part.write(0, DATA[:200])
    wait(part.sending)
    part.close()
    one.admit()
    one.files.remove_objects()
    assert len(machines.objects()) == -(-len(DATA) // PART)


def test_a_replaced_coordinator_cannot_let_anything_count(machines: Machines) -> None:
    """It may still write into the store, and nothing refers to that."""
    one = machines.start("one")
    stale = one.spool.open_part(KEY, DIGEST, len(DATA))
    stale.write(0, DATA)
    other = open_sqlite(machines._folder / "ledger.sqlite", home=Home("", storage=machines.bucket.url))
    with pytest.raises(StoreTakenOver):
        stale.seal()
    with pytest.raises(StoreTakenOver):
        one.checkpoints.save("r1", 0, a_checkpoint(1.0))
    assert other.stored_files() == []
    other.close()


def test_damaged_bytes_are_never_used(machines: Machines) -> None:
    """Each read checks a digest. A damaged update is asked for again after the next start."""
    one = machines.start("one")
    one.admit()
    key = next(key for key, _ in machines.bucket.keys("") if "/00001." in key)
    machines.bucket.put(key, bytes(PART))
    two = machines.start("two")
    source = two.spool.source(KEY, DIGEST)
    assert isinstance(source, StoredUpdate)
    assert source.read(0, PART) == DATA[:PART]
    with pytest.raises(DamagedObject, match="has another digest than its name"):
        source.read(PART - 1, 2)
    with pytest.raises(StoreUnavailable, match="start the coordinator again"):
        source.read(0, 1)
    assert not machines.start("two").spool.is_whole(KEY, DIGEST)


def test_an_update_without_one_of_its_objects_is_not_whole(machines: Machines) -> None:
    """Its client is asked for it again."""
    one = machines.start("one")
    one.admit()
    one.admit(SpoolKey("r1", 12, 0, "other"))
    machines.bucket.delete([next(key for key, _ in machines.bucket.keys("") if "device-7" in key)])
    assert not machines.start("two").spool.is_whole(KEY, DIGEST)


def test_a_store_without_what_counts_is_refused_at_the_start(machines: Machines) -> None:
    """A folder that is not mounted, or another bucket: nothing would be found, and everything asked for again."""
    machines.start().admit()
    machines.bucket.delete([key for key, _ in machines.bucket.keys("")])
    with pytest.raises(StoreError, match="has no spool/run-r1/.*, which the ledger counts: mount the folder"):
        machines.start("two")


def test_the_cache_has_a_limit(machines: Machines) -> None:
    """The copies that were used last stay; what is gone is read from the store."""
    one = machines.start(cache_bytes=3 * len(DATA))
    keys = [SpoolKey("r1", 12, 0, f"device-{number}") for number in range(6)]
    for key in keys:
        one.admit(key)
    here = [one.spool.path(key, DIGEST).exists() for key in keys]
    assert here == [False] * 3 + [True] * 3
    for _ in range(2):
        for key in keys:
            source = one.spool.source(key, DIGEST)
            assert isinstance(source, StoredUpdate)
            assert source.read(3, 200) == DATA[3:203]
            assert one.files.cache.bytes <= 3 * len(DATA)
    one.spool.remove_round("r1", 12)
    cached = list((one.folder / "cached-parts").iterdir())
    assert sum(path.stat().st_size for path in cached) == one.files.cache.bytes


def a_checkpoint(value: float) -> Checkpoint:
    """A model of one value."""
    return Checkpoint({"w": torch.full((40,), value)}, {"Delta": {"w": torch.zeros(40)}}, {"seed": 1})


def value_of(checkpoint: Checkpoint | None) -> float:
    """The value of its model."""
    assert checkpoint is not None
    return float(checkpoint.model["w"][0])


def test_checkpoints_are_found_on_another_machine(machines: Machines) -> None:
    """The newest one, the kept ones, and the first model's file."""
    one = machines.start("one")
    for round_ in range(3):
        one.checkpoints.save("r1", round_, a_checkpoint(float(round_)))
    one.checkpoints.prune("r1", {1, 2})
    two = machines.start("two")
    assert two.checkpoints.rounds("r1") == [1, 2]
    assert value_of(two.checkpoints.latest("r1")) == 2.0
    assert value_of(two.checkpoints.of_round("r1", 1)) == 1.0
    with machines.start("three").checkpoints.open_model("r1", 1) as file:
        assert file.read() == (two.folder / "checkpoints/run-r1/round-000001/model.safetensors").read_bytes()


def test_a_checkpoint_that_was_not_counted_is_none(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before the ledger's transaction: its round is computed again, and its objects are removed."""
    one = machines.start("one")
    one.checkpoints.save("r1", 0, a_checkpoint(0.0))
    monkeypatch.setattr(one.files, "count", lambda *_args, **_values: (_ for _ in ()).throw(StoreError("killed")))
    with pytest.raises(StoreError, match="killed"):
        one.checkpoints.save("r1", 1, a_checkpoint(1.0))
    again = machines.start("one")
    assert again.checkpoints.rounds("r1") == [0]
    assert value_of(again.checkpoints.latest("r1")) == 0.0
    again.files.remove_leftovers()
    again.files.remove_objects()
    assert not [key for key in machines.objects() if "round-000001" in key]
    again.checkpoints.save("r1", 1, a_checkpoint(3.0))
    assert value_of(again.checkpoints.latest("r1")) == 3.0


def test_a_replaced_checkpoint_leaves_no_object(machines: Machines) -> None:
    """The newer one of a round counts, and the copy on a machine that missed it does not."""
    machines.start("one").checkpoints.save("r1", 0, a_checkpoint(0.0))
    two = machines.start("two")
    two.checkpoints.save("r1", 0, a_checkpoint(5.0))
    two.files.remove_objects()
    one = machines.start("one")
    assert value_of(one.checkpoints.latest("r1")) == 5.0
    assert len(machines.objects()) == sum(len(file.parts) for file in one.ledger.store.stored_files())
    one.checkpoints.remove_run("r1")
    one.files.remove_objects()
    assert machines.objects() == []


def test_a_damaged_copy_of_a_checkpoint_is_replaced(machines: Machines) -> None:
    """And a damaged object makes the older checkpoint the newest."""
    one = machines.start("one")
    one.checkpoints.save("r1", 0, a_checkpoint(0.0))
    one.checkpoints.save("r1", 1, a_checkpoint(1.0))
    model = one.folder / "checkpoints/run-r1/round-000001/model.safetensors"
    model.write_bytes(bytes(model.stat().st_size))
    assert value_of(one.checkpoints.latest("r1")) == 1.0
    key = next(key for key, _ in machines.bucket.keys("") if "round-000001/model" in key)
    machines.bucket.put(key, bytes(PART))
    assert value_of(machines.start("two").checkpoints.latest("r1")) == 0.0


def test_copies_of_older_checkpoints_give_way(machines: Machines) -> None:
    """The newest one of each run stays, whatever the limit."""
    one = machines.start(cache_bytes=1)
    for round_ in range(4):
        one.checkpoints.save("r1", round_, a_checkpoint(float(round_)))
    folders = sorted(path.name for path in (one.folder / "checkpoints/run-r1").iterdir())
    assert folders == ["round-000002", "round-000003"]
    assert value_of(one.checkpoints.of_round("r1", 0)) == 0.0
    assert (one.folder / "checkpoints/run-r1/round-000003").exists()


def test_a_directory_moves_into_an_object_store(machines: Machines, tmp_path: Path) -> None:
    """`storage` may be set later. The directory is not needed any more then."""
    folder, ledger = tmp_path / "one", tmp_path / "ledger.sqlite"
    folder.mkdir()
    open_sqlite(ledger, home=Home("directory")).close()
    checkpoints, spool = Checkpoints(folder / "checkpoints"), Spool(folder / "spool")
    checkpoints.save("r1", 0, a_checkpoint(7.0))
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    part.seal()
    spool.open_part(SpoolKey("r1", 12, 0, "b"), DIGEST, 100).close()
    machines.start("one")
    shutil.rmtree(folder)
    two = machines.start("two")
    assert value_of(two.checkpoints.latest("r1")) == 7.0
    assert two.spool.is_whole(KEY, DIGEST)
    machines.kill()
    with pytest.raises(StoreError, match=r"the files of the ledger are in .*: set it to the first one"):
        open_sqlite(ledger, home=Home("directory"))


def test_a_release_is_kept_in_the_store_and_found_by_a_new_machine(bucket: Bucket, tmp_path: Path) -> None:
    """An uploaded file is moved; files that no release needs are removed, in the store too."""
    machine = Machine(bucket, tmp_path / "one", tmp_path / "ledger")
    upload, other = tmp_path / "upload", tmp_path / "other"
    upload.write_bytes(DATA)
    other.write_bytes(b"other")
    releases = ReleaseFiles(machine.folder, machine.files)
    assert releases.keep(upload, DIGEST)
    assert releases.keep(other, blake3(b"other").digest())
    assert releases.keep(upload, DIGEST)  # the upload is gone, and the release is there
    assert not releases.keep(tmp_path / "nowhere", blake3(b"").digest())
    machine.close()
    machine = Machine(bucket, tmp_path / "two", tmp_path / "ledger")
    releases = ReleaseFiles(machine.folder, machine.files)
    assert bytes(releases.opened(DIGEST)) == DATA
    releases.keep_only([DIGEST])
    assert [path.read_bytes() for path in (machine.folder / "releases").iterdir()] == [DATA]
    assert len(machine.files.names("releases")) == 1
    (machine.folder / "releases" / f"{DIGEST.hex()}.bundle").write_bytes(b"changed")
    with pytest.raises(StoreError, match="other bytes than were released"):
        releases.opened(DIGEST)
    machine.close()
