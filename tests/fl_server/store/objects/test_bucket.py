"""Bytes in an object store: what each kind promises, and what is said of wrong credentials and missing buckets."""

import base64
import json
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
from tests.emulated_stores import ACCOUNT, KEY, StoreServer
from tests.s3_server import OTHER_KEY, OTHER_SECRET

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


WRONG_KEY = base64.b64encode(b"wrong").decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "key", "secret", "said"),
    [
        ("s3", "test:key", "wrong", "refuses the credentials .SignatureDoesNotMatch.: check AWS_ACCESS_KEY_ID"),
        ("s3", "test:nobody", "wrong", "refuses the credentials"),
        ("s3", OTHER_KEY, OTHER_SECRET, "access is denied .AccessDenied.: these credentials need to get, put, list"),
        ("az", ACCOUNT, WRONG_KEY, "refuses the credentials .AuthorizationFailure.: check AZURE_STORAGE_ACCOUNT_NAME"),
        ("az", "nobody", KEY, "refuses the credentials"),
    ],
    ids=["s3-secret", "s3-key", "s3-rights", "az-key", "az-account"],
)
def test_wrong_credentials_are_refused_at_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, key: str, secret: str, said: str
) -> None:
    """The message says what to do, and has no secret; nothing is tried for a minute. All requests are refused."""
    server: StoreServer = request.getfixturevalue(kind)
    for name, value in zip(server.environment, (key, secret), strict=True):
        monkeypatch.setenv(name, value)
    bucket = Bucket(f"{kind}://{server.new_bucket()}/p", ObjectsConfig(endpoint=server.endpoint))
    began = time.monotonic()
    asked: list[Callable[[], object]] = [lambda: check_access(bucket), lambda: bucket.delete(["a", "b"])]
    for ask in (*asked, *requests(bucket)):
        with pytest.raises(StoreUnavailable, match=said) as caught:
            ask()
        assert secret not in str(caught.value)
    assert time.monotonic() - began < ObjectsConfig().retry_s


def requests(bucket: Bucket) -> list[Callable[[], object]]:
    """One of each kind but a removal."""
    return [lambda: bucket.put("a", b""), lambda: bucket.get("a"), lambda: bucket.keys("")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "named", "asked"),
    [("s3", "bucket", ["put", "get", "list"]), ("az", "container", ["put", "get", "list"]), ("gs", "bucket", ["put"])],
)
def test_a_missing_bucket_is_named(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, named: str, asked: list[str]
) -> None:
    """Also by a list, which could be empty instead. fake-gcs-server tells a missing bucket from an object by a put."""
    server: StoreServer = request.getfixturevalue(kind)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(f"{kind}://nobucket/p", ObjectsConfig(endpoint=server.endpoint))
    for _, ask in zip(asked, requests(bucket), strict=False):
        with pytest.raises(StoreUnavailable, match=f"there is no {named} 'nobucket': make it, or correct `storage`"):
            ask()


@pytest.mark.parametrize(
    ("kind", "variables", "said"),
    [
        ("az", {}, "Account must be specified: check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY and"),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "no base64!"}, "Invalid Access Key"),
        ("gs", {"GOOGLE_SERVICE_ACCOUNT": "/away.json"}, "/away.json: No such file .*: check GOOGLE_SERVICE_ACCOUNT"),
        ("gs", {"GOOGLE_SERVICE_ACCOUNT": "/dev/null"}, "decode service account file: .*: check GOOGLE_SERVICE"),
    ],
    ids=["no account", "no key", "no file", "empty file"],
)
def test_credentials_that_cannot_be_read_are_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, variables: dict[str, str], said: str
) -> None:
    """A store is not opened with them, and the message says which variable to check."""
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=f"storage = '{kind}://b/p' cannot be used: .*{said}"):
        Bucket(f"{kind}://b/p", ObjectsConfig())


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
        body = b"body" if status == 200 else f"<Error><Code>{server.code}</Code></Error>".encode()
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
    code = "SlowDown"
    asked = 0
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FailingStore)
        self.released = threading.Event()


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, failures: list[int], retry_s: float, kind: str = "s3", *, proxy: bool = False
) -> Iterator[tuple[FailingServer, Bucket]]:
    """A store that fails, and its bucket. proxy: of all requests over plain HTTP."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with FailingServer() as server:
        server.failures = failures
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        if proxy:
            monkeypatch.setenv("http_proxy", endpoint)
        try:
            yield server, Bucket(f"{kind}://b", ObjectsConfig(endpoint=endpoint, retry_s=retry_s, request_s=0.5))
        finally:
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


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "AuthenticationRequired", "refuses the credentials .AuthenticationRequired.: check GOOGLE_SERVICE"),
        (403, "AccessDenied", "access is denied .AccessDenied.: these credentials need to get"),
        (404, "NoSuchBucket", "there is no bucket 'b'"),
        (400, "InvalidArgument", "the store answers 400 InvalidArgument;"),
    ],
)
def test_what_google_answers_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: str, said: str
) -> None:
    """The codes are those of Google's XML protocol, which the server of the other tests does not send."""
    (tmp_path / "key.json").write_text(
        json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})
    )
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    with failing(monkeypatch, [status], 60, "gs") as (server, bucket):
        server.code = code
        with pytest.raises(StoreUnavailable, match=said):
            bucket.get("a")
        assert server.asked == 1


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_missing_credentials_are_named_at_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Without any the provider's service for machines is asked, here over a proxy that does not find it."""
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")  # where Google's tools keep credentials
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    said = "there are no credentials: set (GOOGLE|AZURE)_.* or give it a role"
    with failing(monkeypatch, [404] * 9, 60, kind, proxy=True) as (server, bucket):
        for ask in requests(bucket):
            with pytest.raises(StoreUnavailable, match=said):
                ask()
        assert server.asked
