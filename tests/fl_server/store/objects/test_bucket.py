"""Bytes in an object store: what each kind promises, and what is said of wrong credentials and missing buckets."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fl_server.settings.sections import ObjectsConfig
from fl_server.store.errors import StoreError, StoreFull, StoreUnavailable
from fl_server.store.objects.bucket import Bucket, NoObject, check_access
from tests.s3_server import OTHER_KEY, OTHER_SECRET, S3Server

BYTES = bytes(range(256)) * 40


def test_bytes_come_back_whole_and_by_ranges(bucket: Bucket) -> None:
    """What was put is read back, also from a memory of our own, and any range of it."""
    bucket.put("run-r/a", BYTES)
    bucket.put("run-r/b", memoryview(BYTES)[10:20])
    assert bucket.get("run-r/a") == BYTES
    assert bucket.get("run-r/a", 1000, 24) == BYTES[1000:1024]
    assert bucket.get("run-r/b") == BYTES[10:20]


def test_an_empty_object_is_an_object(bucket: Bucket) -> None:
    """An object may be empty."""
    bucket.put("empty", b"")
    assert (bucket.get("empty"), bucket.keys("")) == (b"", [("empty", 0)])


def test_a_list_has_the_objects_of_a_folder_alone(bucket: Bucket) -> None:
    """A folder's list has its objects and those below, and none of a folder whose name begins the same."""
    for key in ("run-a/1", "run-a/sub/2", "run-ab/3"):
        bucket.put(key, b"xy")
    assert sorted(bucket.keys("run-a")) == [("run-a/1", 2), ("run-a/sub/2", 2)]
    assert len(bucket.keys("")) == 3
    assert bucket.keys("run-c") == []


def test_objects_are_removed_once_or_twice(bucket: Bucket) -> None:
    """Removing is complete, and an object that is not there is no error, alone or among others."""
    for key in ("a/1", "a/2", "b/3"):
        bucket.put(key, b"x")
    bucket.delete(["a/1", "a/2", "a/never"])
    bucket.delete(["a/1"])
    bucket.delete([])
    assert bucket.keys("") == [("b/3", 1)]


def test_a_missing_object_and_a_range_behind_its_end_are_errors(bucket: Bucket) -> None:
    """No fewer bytes than asked for come back."""
    bucket.put("a", b"12345")
    with pytest.raises(NoObject, match="no such object"):
        bucket.get("b")
    with pytest.raises(StoreError):
        bucket.get("a", 3, 10)


def test_the_same_object_may_be_put_again(bucket: Bucket) -> None:
    """A request whose answer was lost is repeated."""
    bucket.put("a", BYTES)
    bucket.put("a", BYTES, durable=True)
    assert bucket.get("a") == BYTES


def test_access_is_checked_and_leaves_nothing(bucket: Bucket) -> None:
    """The check of a store writes, reads, lists and removes."""
    check_access(bucket)
    assert bucket.keys("") == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A folder that is not mounted is not made on the disk below."""
    with pytest.raises(StoreError, match=r"there is no folder .*away: mount or make it"):
        Bucket(f"file://{tmp_path}/away", ObjectsConfig())
    (tmp_path / "objects").mkdir()
    bucket = Bucket(f"file://{tmp_path}/objects", ObjectsConfig(retry_s=0))
    bucket.put("a", b"x")
    (tmp_path / "objects" / "a").unlink()
    (tmp_path / "objects").rmdir()
    with pytest.raises(StoreUnavailable, match="there is no folder"):
        bucket.get("a")


def test_a_folder_that_cannot_be_written_is_a_full_disk(tmp_path: Path) -> None:
    """An operator can give the right, and the coordinator goes on."""
    bucket = Bucket(f"file://{tmp_path}", ObjectsConfig(retry_s=30))
    (tmp_path / "run").write_bytes(b"a file in the place of a folder")
    with pytest.raises(StoreError, match="could not put run/a"):
        Bucket(f"file://{tmp_path}", ObjectsConfig(retry_s=0)).put("run/a", b"x")
    assert bucket.keys("") == [("run", 31)]


def test_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """What the library has not renamed is no object, and does not stay."""
    bucket = Bucket(f"file://{tmp_path}", ObjectsConfig())
    bucket.put("a/1", b"x")
    (tmp_path / "a" / "2#1").write_bytes(b"torn")
    assert bucket.keys("") == [("a/1", 1)]
    bucket.remove_temporary()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "secret", "said"),
    [
        ("test:key", "wrong", "refuses the credentials .SignatureDoesNotMatch.: check AWS_ACCESS_KEY_ID"),
        ("test:nobody", "wrong", "refuses the credentials"),
        (OTHER_KEY, OTHER_SECRET, "access is denied .AccessDenied.: these credentials need to get, put, list"),
    ],
    ids=["secret", "key", "rights"],
)
def test_wrong_credentials_are_refused_at_once(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, key: str, secret: str, said: str
) -> None:
    """The message says what to do, and has no secret; nothing is tried for a minute."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    bucket = Bucket(f"s3://{s3.new_bucket()}/p", ObjectsConfig(endpoint=s3.endpoint))
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=said) as caught:
        check_access(bucket)
    assert secret not in str(caught.value)
    assert time.monotonic() - began < ObjectsConfig().retry_s


@pytest.mark.slow
def test_a_missing_bucket_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a list, which could be empty instead."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket("s3://nobucket/p", ObjectsConfig(endpoint=s3.endpoint))
    asked: list[Callable[[], object]] = [lambda: bucket.put("a", b""), lambda: bucket.get("a"), lambda: bucket.keys("")]
    for ask in asked:
        with pytest.raises(StoreUnavailable, match="there is no bucket 'nobucket': make it, or correct `storage`"):
            ask()


HANGS = -1


class FailingStore(BaseHTTPRequestHandler):
    """Answers GET with a body, after as many failures as the server still has."""

    def do_GET(self) -> None:
        """Fail, or answer."""
        server = self.server
        assert isinstance(server, FailingServer)
        server.asked += 1
        status = server.failures.pop(0) if server.failures else 200
        if status == 0:
            self.connection.close()
            return
        if status == HANGS:
            server.released.wait()
            return
        body = b"body" if status == 200 else b"<Error><Code>SlowDown</Code></Error>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
        del format, args


class FailingServer(ThreadingHTTPServer):
    """Failures to come: statuses; 0 cuts the connection, HANGS does not answer."""

    failures: list[int]
    asked = 0
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FailingStore)
        self.released = threading.Event()


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, failures: list[int], retry_s: float
) -> Iterator[tuple[FailingServer, Bucket]]:
    """A store that fails, and its bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with FailingServer() as server:
        server.failures = failures
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield server, Bucket("s3://b", ObjectsConfig(endpoint=endpoint, retry_s=retry_s, request_s=0.5))
        server.released.set()
        server.shutdown()
        thread.join()


def test_a_failing_and_throttling_store_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the store, its throttling and cut connections pass."""
    with failing(monkeypatch, [500, 503, 429, 0], 60) as (server, bucket):
        assert bucket.get("a") == b"body"
        assert server.asked == 5


def test_a_store_that_hangs_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has `request_s`."""
    with failing(monkeypatch, [HANGS], 60) as (server, bucket):
        assert bucket.get("a") == b"body"
        assert server.asked == 2


def test_retries_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `retry_s` the error says what the store answered; as with a full disk, the coordinator waits."""
    with failing(monkeypatch, [503] * 1000, 0.3) as (server, bucket):
        with pytest.raises(StoreFull, match=r"the store answers 503 SlowDown after 0\.3 s of tries"):
            bucket.get("a")
        assert 1 < server.asked < 10


def test_an_unreachable_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is refused is an unavailable store."""
    with failing(monkeypatch, [], 0) as (server, _):
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.raises(StoreUnavailable, match="check the network and objects.endpoint"):
        Bucket("s3://b", ObjectsConfig(endpoint=endpoint, retry_s=0)).get("a")
