"""Repeated or wrong messages in a daemon's own session.

The proxy records the daemon's uploads and its session id. None of these messages may change which updates count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import grpc

from fl_client.storage.pending_updates import PendingUpdates, key_of
from protos.chunks import make_chunk
from protos.digests import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from tests.chaos.fault import DidNotHappen, Fault
from tests.chaos.links import CHUNKS, DAEMONS, proxy_of, wait_for
from tests.chaos.proxy_log import Upload
from tests.processes.process import TIMEOUT_S, eventually
from tests.processes.raw_client import RawClient, Update, messages

if TYPE_CHECKING:
    from tests.chaos.cluster import ChaosCluster

When = Literal["at once", "after the commit", "after a restart"]
WHENS: tuple[When, ...] = ("at once", "after the commit", "after a restart")
Misplaced = Literal["an earlier round", "a future round", "an unknown run", "an ended run"]
MISPLACED: tuple[Misplaced, ...] = ("an earlier round", "a future round", "an unknown run", "an ended run")
STRANGER = "raw-stranger"
CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Repeat:
    """An update is sent twice more, and each answer equals the first byte for byte."""

    daemon: int
    when: When
    may_lose_update = False

    @property
    def name(self) -> str:
        return f"repeat {self.when}"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        upload = seen(cluster, run_id, self.daemon)
        first = answer(cluster, self.daemon, upload)
        if not first.admitted:
            raise DidNotHappen(f"the daemon's update was not admitted: {first.detail}")
        assert first.digest == upload[0].header.digest, "the receipt is for another update"
        if self.when == "after the commit":
            eventually(lambda: cluster.server.run(run_id).rounds_done > first.key.round, "its round is committed")
        if self.when == "after a restart":
            cluster.server.kill()
            cluster.server.serve()
        again = answer(cluster, self.daemon, upload)
        assert again.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True), (
            f"the first answer was {first}, the second is {again}"
        )


@dataclass(frozen=True)
class Conflict:
    """Another update with the same key gets the receipt of the first one."""

    daemon: int
    may_lose_update = False
    name = "another update for the same key"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        upload = seen(cluster, run_id, self.daemon)
        first = answer(cluster, self.daemon, upload)
        if not first.admitted:
            raise DidNotHappen(f"the daemon's update was not admitted: {first.detail}")
        second = answer(cluster, self.daemon, altered(upload))
        assert second == first, f"the first answer was {first}, the answer to another update {second}"


@dataclass(frozen=True)
class AnotherKey:
    """An update with the key of another round or run is refused."""

    daemon: int
    what: Misplaced
    may_lose_update = False

    @property
    def name(self) -> str:
        return f"update for {self.what}"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        upload = altered(seen(cluster, run_id, self.daemon, since=1))
        key = upload[0].header.key
        if self.what == "an earlier round":
            key.round -= 1
        elif self.what == "a future round":
            key.round += 100
        else:
            key.run_id = "unknown" if self.what == "an unknown run" else _ended(cluster, run_id)
        receipt = answer(cluster, self.daemon, upload)
        ours = receipt.admitted and receipt.digest == upload[0].header.digest
        assert not ours, f"an update for {self.what} was admitted: {receipt}"


@dataclass(frozen=True)
class ForeignSession:
    """A daemon's update is sent in an unknown session and in another client's session."""

    daemon: int
    may_lose_update = False
    name = "foreign session"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        upload = altered(seen(cluster, run_id, self.daemon))
        upload[0].header.session_id = "unknown"
        with RawClient(cluster.server.address, STRANGER) as client:
            code = code_of(client, upload)
            assert code is grpc.StatusCode.UNAUTHENTICATED, f"an unknown session was answered with {code}"
            client.register()
            upload[0].header.session_id = client.session_id
            receipt = _submitted(client, upload)
        with cluster.server.admin() as admin:
            admin.clients.forget_client(STRANGER)
        assert not receipt.admitted, f"a stranger's update was admitted: {receipt}"
        assert receipt.reason in {training_pb2.REFUSAL_REASON_NOT_ASSIGNED, training_pb2.REFUSAL_REASON_LATE}


@dataclass(frozen=True)
class TwoAtOnce:
    """While an upload is held, a second stream with the same upload gets UNAVAILABLE."""

    daemon: int
    message: int
    may_lose_update = False
    name = "two streams at once"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        proxy = proxy_of(cluster, self.daemon)
        with held_upload(cluster, self.daemon, self.message), RawClient(cluster.server.address) as client:
            stream = stream_of(pending(cluster, run_id, self.daemon), proxy.session_id)
            code = code_of(client, stream)
        assert code is grpc.StatusCode.UNAVAILABLE, f"a second stream of an open upload was answered with {code}"


@dataclass(frozen=True)
class Disorder:
    """While a cut upload waits for its daemon, its chunks arrive out of order, with gaps, doubled or without an end."""

    daemon: int
    message: int
    may_lose_update = False
    name = "chunks out of order"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        proxy = proxy_of(cluster, self.daemon)
        with held_upload(cluster, self.daemon, self.message), RawClient(cluster.server.address) as client:
            proxy.away()
            header, *chunks, trailer = stream_of(pending(cluster, run_id, self.daemon), proxy.session_id)
            for disordered in (
                [header, *chunks[::-1], trailer],
                [header, chunks[0], *chunks[2:], trailer],
                [header, chunks[0], *chunks, trailer],
                [header, chunks[0], trailer],
                [header, chunks[0]],
                [header],
            ):
                code = eventually(partial(_settled, client, disordered), "the cut stream is released")
                assert code is grpc.StatusCode.DATA_LOSS, f"chunks out of order were answered with {code}"


@contextmanager
def held_upload(cluster: ChaosCluster, daemon: int, message: int) -> Iterator[None]:
    """Hold the daemon's next upload inside a chunk during the block. Raises DidNotHappen if there is none."""
    proxy = proxy_of(cluster, daemon)
    trap = proxy.cut("up", message, "inside", "hold")
    try:
        wait_for(cluster, trap)
        yield
    finally:
        proxy.pass_on()


def pending(cluster: ChaosCluster, run_id: str, daemon: int) -> Update:
    """The update that the daemon is sending, read from its disk.

    Raises DidNotHappen if the daemon is still sending an update of an earlier run.
    """
    state_dir = Path(list(cluster.daemons.values())[daemon].settings["state_dir"])
    kept = PendingUpdates(state_dir / "pending")
    keys = [key_of(stored.header.key) for stored in kept.files() if stored.header.key.run_id == run_id]
    if not keys:
        raise DidNotHappen("the upload was one of an earlier run")
    key = max(keys)
    stored = kept.file(key)
    assert stored is not None, f"the daemon is sending {key} and has not kept it"
    found = kept.find(key, stored.work_digest)
    assert found is not None, f"expected the update of {key} to be whole"
    size = found.header.size_bytes
    return Update(found.header, found.read(0, size), training_pb2.UpdateTrailer(size_bytes=size))


def stream_of(update: Update, session_id: str) -> Upload:
    """The messages of an update."""
    update.header.session_id = session_id
    return messages(update, CHUNK_BYTES)


def seen(cluster: ChaosCluster, run_id: str, daemon: int, since: int = 0) -> Upload:
    """The daemon's latest upload for round `since` or a later one, once there is one that came in one stream.

    Raises DidNotHappen when the run is over without.
    """
    proxy = proxy_of(cluster, daemon)

    def latest() -> Upload | None:
        whole = [each for each in proxy.uploads() if not each[0].header.resume_offset]
        keys = [each[0].header.key for each in whole]
        own = [each for each, key in zip(whole, keys, strict=True) if key.run_id == run_id and key.round >= since]
        return own[-1] if own else None

    eventually(lambda: latest() or cluster.over(), "the daemon uploads, or the run is over")
    upload = latest()
    if upload is None:
        raise DidNotHappen("the daemon completed no upload before the run was over")
    return copied(upload)


def copied(upload: Upload) -> Upload:
    """A copy of the messages."""
    return [pb.SubmitUpdateRequest.FromString(each.SerializeToString()) for each in upload]


def altered(upload: Upload) -> Upload:
    """Another well-formed update: one low mantissa bit of its first chunk is flipped."""
    changed = copied(upload)
    data = changed[1].chunk.data
    changed[1].chunk.CopyFrom(make_chunk(bytes([data[0] ^ 1]) + data[1:], 0, len(data)))
    changed[0].header.digest.CopyFrom(digest_message(digest_of(b"".join(each.chunk.data for each in changed[1:-1]))))
    return changed


def answer(cluster: ChaosCluster, daemon: int, upload: Upload) -> training_pb2.Receipt:
    """The receipt for an upload in the daemon's session; retries until the coordinator answers."""
    proxy = proxy_of(cluster, daemon)

    def once() -> training_pb2.Receipt | None:
        upload[0].header.session_id = proxy.session_id
        with RawClient(cluster.server.address) as client, suppress(grpc.RpcError):
            return _submitted(client, upload)
        return None

    receipt = eventually(once, "the coordinator answers an update that was sent again")
    assert receipt is not None
    return receipt


def code_of(client: RawClient, upload: Sequence[pb.SubmitUpdateRequest]) -> Any:
    """The status code of an upload. Raises DidNotHappen if its round is already closed."""
    try:
        receipt = _submitted(client, upload)
    except grpc.RpcError as error:
        return error.code()
    if receipt.reason == training_pb2.REFUSAL_REASON_LATE:
        raise DidNotHappen(f"the upload came too late: {receipt.detail}")
    return grpc.StatusCode.OK


def _settled(client: RawClient, upload: Upload) -> Any:
    """The status code of an upload; None until the coordinator notices the end of an older stream."""
    code = code_of(client, upload)
    return None if code is grpc.StatusCode.UNAVAILABLE else code


def _submitted(client: RawClient, upload: Sequence[pb.SubmitUpdateRequest]) -> training_pb2.Receipt:
    receipt: training_pb2.Receipt = client.stub.SubmitUpdate(iter(upload), timeout=TIMEOUT_S).receipt
    return receipt


def _ended(cluster: ChaosCluster, run_id: str) -> str:
    with cluster.server.admin() as admin:
        ended = [run.run_id for run in admin.runs.list_runs() if run.HasField("ended") and run.run_id != run_id]
    if not ended:
        raise DidNotHappen("no run has ended yet")
    return ended[-1]


def _repeat(when: When, draw: Random) -> Fault:
    return Repeat(draw.randrange(DAEMONS), when)


def _another_key(what: Misplaced, draw: Random) -> Fault:
    return AnotherKey(draw.randrange(DAEMONS), what)


MAKE: list[Callable[[Random], Fault]] = [
    *(partial(_repeat, when) for when in WHENS),
    *(partial(_another_key, what) for what in MISPLACED),
    lambda draw: Conflict(draw.randrange(DAEMONS)),
    lambda draw: ForeignSession(draw.randrange(DAEMONS)),
    lambda draw: TwoAtOnce(draw.randrange(DAEMONS), draw.randint(1, CHUNKS)),
    lambda draw: Disorder(draw.randrange(DAEMONS), draw.randint(1, CHUNKS)),
]
FAULTS: dict[str, Callable[[Random], Fault]] = {make(Random(0)).name: make for make in MAKE}
