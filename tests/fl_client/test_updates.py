"""Updates on disk until their outcome is known."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from fl_client.updates import KEPT, Outgoing, PendingUpdates, Update, key_of, work_of
from protos.digests import digest_message, digest_of
from protos.fl.v1 import training_pb2

WORK = bytes(32)


def update(round_number=0, data=b"12345678", run_id="run"):
    """An update of the only run."""
    key = training_pb2.ExchangeKey(run_id=run_id, round=round_number)
    header = training_pb2.UpdateHeader(key=key, size_bytes=len(data), digest=digest_message(digest_of(data)))
    return Update(WORK, header, (data,))


@pytest.fixture
def kept(tmp_path):
    """An empty folder."""
    return PendingUpdates(tmp_path)


def test_what_was_put_is_found_after_a_restart(kept, tmp_path):
    """Header and bytes are the same for another object on the same folder."""
    kept.put(update())
    found = PendingUpdates(tmp_path).find(("run", 0, 0), WORK)
    assert (found.header, found.read(0, 8)) == (update().header, b"12345678")


def test_an_update_can_be_read_after_it_was_dropped(kept):
    """What is being sent stays readable, from any offset, while its file goes."""
    outgoing = kept.put(update())
    kept.drop(("run", 0, 0))
    assert (outgoing.read(2, 3), outgoing.read(0, 8)) == (b"345", b"12345678")


def test_an_update_is_written_over_one_that_was_dropped(kept, tmp_path):
    """The same file on disk, whether the update is shorter or longer, with nothing of what stood in it."""
    files = set()
    for round_, data in enumerate((b"12345678", b"abc", b"a longer one than both")):
        outgoing = kept.put(update(round_, data))
        (path,) = tmp_path.iterdir()
        files.add(path.stat().st_ino)
        assert outgoing.read(0, len(data)) == data
        assert PendingUpdates(tmp_path).find(("run", round_, 0), WORK).read(0, len(data)) == data
        del outgoing
        kept.drop(("run", round_, 0))
    assert len(files) == 1


@pytest.mark.parametrize("readers", [1, 2])
def test_what_is_being_sent_is_not_written_over(kept, readers):
    """An upload that has not heard of its end sends its own bytes, or none, but never another round's."""
    sending = [kept.put(update()), kept.find(("run", 0, 0), WORK)]
    del sending[readers:]
    kept.drop(("run", 0, 0))
    kept.put(update(1, b"abcdefgh"))
    assert sending[0].read(0, 8) == b"12345678"


def test_no_spare_file_outlives_its_use(kept, tmp_path):
    """It goes when a run ends, and when a daemon starts."""
    for forget in (kept.forget_spare, lambda: PendingUpdates(tmp_path)):
        kept.put(update())
        kept.drop(("run", 0, 0))
        assert len(list(tmp_path.iterdir())) == 1
        forget()
        assert list(tmp_path.iterdir()) == []


def test_an_update_that_was_cut_is_an_error(kept, tmp_path):
    """Bytes that are gone are never sent as fewer."""
    outgoing = kept.put(update())
    (path,) = tmp_path.glob("*.update")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OSError, match="expected 8 bytes of the update from 0 on, got 7"):
        outgoing.read(0, 8)


def test_an_update_that_no_disk_took_is_read_from_memory():
    """Payloads in pieces are one run of bytes."""
    whole = Outgoing.in_memory(replace(update(), pieces=(b"123", b"45678")))
    assert whole.read(2, 3) == b"345"


def test_an_update_for_other_work_is_dropped(kept):
    """The same key from another coordinator's run asks for other work: the old bytes must not go there."""
    kept.put(update())
    assert kept.find(("run", 0, 0), b"\x01" * 32) is None
    assert kept.unsettled() == []


@pytest.mark.parametrize("length", [0, 10, 45, -1])
def test_a_torn_file_is_no_update(kept, tmp_path, length):
    """Cut anywhere, a file is not taken for an update."""
    kept.put(update())
    (path,) = tmp_path.glob("*.update")
    path.write_bytes(path.read_bytes()[:length])
    assert kept.find(("run", 0, 0), WORK) is None


def test_changed_bytes_are_no_update(kept, tmp_path):
    """The digest in the header stands for the bytes."""
    kept.put(update())
    (path,) = tmp_path.glob("*.update")
    path.write_bytes(path.read_bytes()[:-1] + b"9")
    assert kept.find(("run", 0, 0), WORK) is None


def test_only_the_newest_are_kept(kept):
    """Outcomes that never come do not fill the disk."""
    for number in range(KEPT + 2):
        kept.put(update(number))
    assert [key.round for key in kept.unsettled()] == [2, 3, 4, 5]


def test_a_run_id_is_not_a_path(kept, tmp_path):
    """A hostile run id stays inside the folder."""
    kept.put(update(run_id="../../evil"))
    assert [path.parent for path in tmp_path.rglob("*.update")] == [tmp_path]
    assert [key_of(key) for key in kept.unsettled()] == [("../../evil", 0, 0)]


def test_what_was_left_half_written_goes(tmp_path):
    """A part file of a process that was killed is removed at the next start."""
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
def test_work_is_all_that_the_result_depends_on(changes, same):
    """Attempt and deadline change no bit of the update; seed and state epoch do."""
    assignment = training_pb2.Assignment(task="tiny", training=training_pb2.LocalTraining(seed=1))
    other = training_pb2.Assignment()
    other.CopyFrom(assignment)
    other.MergeFrom(training_pb2.Assignment(**changes))
    assert (work_of(other) == work_of(assignment)) is same
