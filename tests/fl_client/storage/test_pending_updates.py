"""Updates are kept on disk until their outcome is known."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_client.storage.pending_updates import MAX_KEPT, PendingUpdate, PendingUpdates, Update, key_of, work_digest
from protos.digests import digest_message, digest_of
from protos.fl.v1 import tensor_pb2, training_pb2

WORK = bytes(32)


def update(round_number: int = 0, data: bytes = b"12345678", run_id: str = "run") -> Update:
    """An update of the only run."""
    key = training_pb2.ExchangeKey(run_id=run_id, round=round_number)
    header = training_pb2.UpdateHeader(key=key, size_bytes=len(data), digest=digest_message(digest_of(data)))
    return Update(WORK, header, (data,))


@pytest.fixture
def kept(tmp_path: Path) -> PendingUpdates:
    """An empty folder."""
    return PendingUpdates(tmp_path)


def test_a_saved_update_is_found_after_a_restart(kept: PendingUpdates, tmp_path: Path) -> None:
    """Another object on the same folder reads the same header and bytes."""
    kept.put(update())
    found = PendingUpdates(tmp_path).find(("run", 0, 0), WORK)
    assert found is not None
    assert (found.header, found.read(0, 8)) == (update().header, b"12345678")


def test_an_update_can_be_read_after_it_was_dropped(kept: PendingUpdates) -> None:
    """An update stays readable from any offset after its file is removed."""
    outgoing = kept.put(update())
    kept.drop(("run", 0, 0))
    assert (outgoing.read(2, 3), outgoing.read(0, 8)) == (b"345", b"12345678")


def test_an_update_reuses_the_file_of_a_dropped_one(kept: PendingUpdates, tmp_path: Path) -> None:
    """The same file is used for shorter and longer updates, and nothing of the old content stays."""
    files = set()
    for round_, data in enumerate((b"12345678", b"abc", b"a longer one than both")):
        outgoing = kept.put(update(round_, data))
        (path,) = tmp_path.iterdir()
        files.add(path.stat().st_ino)
        assert outgoing.read(0, len(data)) == data
        found = PendingUpdates(tmp_path).find(("run", round_, 0), WORK)
        assert found is not None
        assert found.read(0, len(data)) == data
        del found
        del outgoing
        kept.drop(("run", round_, 0))
    assert len(files) == 1


@pytest.mark.parametrize("readers", [1, 2])
def test_an_update_in_sending_is_not_overwritten(kept: PendingUpdates, readers: int) -> None:
    """An upload that does not know of its end sends its own bytes or none, never those of another round."""
    sending = [kept.put(update()), kept.find(("run", 0, 0), WORK)]
    del sending[readers:]
    kept.drop(("run", 0, 0))
    kept.put(update(1, b"abcdefgh"))
    assert sending[0] is not None
    assert sending[0].read(0, 8) == b"12345678"


def test_spare_files_are_removed(kept: PendingUpdates, tmp_path: Path) -> None:
    """They are removed when a run ends and when a daemon starts."""
    for forget in (kept.remove_spare, lambda: PendingUpdates(tmp_path)):
        kept.put(update())
        kept.drop(("run", 0, 0))
        assert len(list(tmp_path.iterdir())) == 1
        forget()
        assert list(tmp_path.iterdir()) == []


def test_an_update_that_was_cut_is_an_error(kept: PendingUpdates, tmp_path: Path) -> None:
    """A shortened file is never sent."""
    outgoing = kept.put(update())
    (path,) = tmp_path.glob("*.update")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OSError, match="expected 8 bytes of the update at 0, got 7"):
        outgoing.read(0, 8)


def test_an_unsaved_update_is_read_from_memory() -> None:
    """The pieces of its payloads are read as one sequence of bytes."""
    whole = PendingUpdate.in_memory(replace(update(), pieces=(b"123", b"45678")))
    assert whole.read(2, 3) == b"345"


def test_an_update_for_other_work_is_dropped(kept: PendingUpdates) -> None:
    """The same key of another coordinator's run is other work and must not get the old bytes."""
    kept.put(update())
    assert kept.find(("run", 0, 0), b"\x01" * 32) is None
    assert kept.exchange_keys() == []


@pytest.mark.parametrize("length", [0, 10, 45, -1])
def test_a_torn_file_is_not_read(kept: PendingUpdates, tmp_path: Path, length: int) -> None:
    """A file cut at any byte is not read as an update."""
    kept.put(update())
    (path,) = tmp_path.glob("*.update")
    path.write_bytes(path.read_bytes()[:length])
    assert kept.find(("run", 0, 0), WORK) is None


def test_changed_bytes_are_not_read(kept: PendingUpdates, tmp_path: Path) -> None:
    """The digest in the header must match the bytes."""
    kept.put(update())
    (path,) = tmp_path.glob("*.update")
    path.write_bytes(path.read_bytes()[:-1] + b"9")
    assert kept.find(("run", 0, 0), WORK) is None


def test_only_the_newest_are_kept(kept: PendingUpdates) -> None:
    """Missing outcomes do not fill the disk."""
    for number in range(MAX_KEPT + 2):
        kept.put(update(number))
    assert [key.round for key in kept.exchange_keys()] == [2, 3, 4, 5]


def test_a_run_id_is_not_a_path(kept: PendingUpdates, tmp_path: Path) -> None:
    """A hostile run id stays inside the folder."""
    kept.put(update(run_id="../../evil"))
    assert [path.parent for path in tmp_path.rglob("*.update")] == [tmp_path]
    assert [key_of(key) for key in kept.exchange_keys()] == [("../../evil", 0, 0)]


def test_half_written_files_are_removed(tmp_path: Path) -> None:
    """A part file of a killed process is removed at the next start."""
    (tmp_path / "x.part").write_bytes(b"")
    PendingUpdates(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"attempt": 2}, True),
        ({"deadline": {"seconds": 3}}, True),
        ({"training": {"seed": 2}}, False),
        ({"state_epoch": 1}, False),
    ],
    ids=str,
)
def test_the_work_digest_covers_all_inputs(changes: dict[str, Any], same: bool) -> None:
    """Attempt and deadline do not change it; seed and state epoch do."""
    assignment = training_pb2.Assignment(task="tiny", training=training_pb2.LocalTraining(seed=1))
    other = training_pb2.Assignment()
    other.CopyFrom(assignment)
    other.MergeFrom(training_pb2.Assignment(**changes))
    assert (work_digest(other) == work_digest(assignment)) is same


def test_an_update_in_another_encoding_is_other_work() -> None:
    """It cannot be sent in place of the wanted one."""
    plain = training_pb2.Assignment(upload_encodings=[tensor_pb2.ENCODING_PLAIN])
    int8 = training_pb2.Assignment(upload_encodings=[tensor_pb2.ENCODING_INT8])
    sparse, sparser = (
        training_pb2.Assignment(upload_encodings=[tensor_pb2.ENCODING_TOP_K], upload_fraction=fraction)
        for fraction in (0.1, 0.2)
    )
    assert len({work_digest(assignment) for assignment in (plain, int8, sparse, sparser)}) == 4


def test_the_same_bundle_in_fewer_bytes_is_the_same_work() -> None:
    """A coordinator that was restarted sends the assignment again without differences: nothing is trained again."""
    digest, other = (tensor_pb2.Digest(value=bytes([number])) for number in (1, 2))
    resource = tensor_pb2.Resource(digest=digest, size_bytes=8)
    smaller = tensor_pb2.Resource(
        digest=digest, size_bytes=8, is_base=True, difference=tensor_pb2.Difference(base=other, size_bytes=3)
    )
    assert digest_with(smaller) == digest_with(resource)
    assert digest_with(tensor_pb2.Resource(digest=other, size_bytes=8)) != digest_with(resource)


def digest_with(resource: tensor_pb2.Resource) -> tuple[bytes, bytes]:
    """The work digests of an assignment and of an evaluation with this resource."""
    assignments = training_pb2.Assignment(resources=[resource]), training_pb2.EvaluationAssignment(resources=[resource])
    return work_digest(assignments[0]), work_digest(assignments[1])
