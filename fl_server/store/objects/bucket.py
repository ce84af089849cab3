"""Bytes in an object store: put, ranged get, list and delete of whole objects, with bounded retries.

This is all that the coordinator uses of an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure,
or a folder. Objects are written once and never changed, so each request may be repeated. No multipart upload of a store
is used: a killed process would leave parts behind that no listing shows. `files` cuts files into objects instead.

Whole files are read here too, part by part, with every digest checked; local copies of them have a limit.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from blake3 import blake3
from prometheus_client import Histogram

from fl_common.extras import install_hint
from fl_common.files import fsync_path, make_folders
from fl_common.units import counted
from fl_server.settings.sections import ObjectsConfig, storage_parts
from fl_server.store.database.store import StoredFile
from fl_server.store.errors import FULL_ERRNOS, StoreError, StoreUnavailable, disk_error, disk_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

R = TypeVar("R")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Waits between two tries of a request: the first one, and the longest."""
AT_ONCE = 1000
"""Objects in one request to delete."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
"""The code in the answer to a request, or in that to one object of a removal, which has no status."""
_ERRNO = re.compile(r"\(os error (\d+)\)")
_TEMPORARY = re.compile(r".+#\d+")
"""Names of files that the library has not renamed yet."""
_AGAIN = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which a repeated request may succeed."""
_WRONG_KEYS = frozenset({"SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "ExpiredToken"})
_NOT_AUTHENTICATED = ("failed to authenticate", "token request")
"""Words of Azure for a wrong key, which has several codes, and of the library for a refused identity."""
_DENIED = "AccessDenied"
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FINAL = frozenset({"PermissionDeniedError", "UnauthenticatedError", "NotSupportedError", "InvalidPathError"})
"""The library's errors that no repetition changes."""
_METADATA_SERVICES = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_KEYS_OF = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT, the path of a key's file,",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class NoObject(StoreError):
    """There is no object of this key, or the range is behind its end."""


class Bucket:
    """The objects under the URL in `storage`. Blocking and thread-safe.

    Raises StoreUnavailable after the retries: the store cannot be reached, is too busy, or refuses the credentials. All
    of that can be repaired while the coordinator waits.
    """

    def __init__(self, url: str, settings: ObjectsConfig, seconds: Histogram | None = None) -> None:
        """Open the store without a request to it. Raises StoreError for a missing extra or a missing folder.

        seconds: of requests, by kind and result.
        """
        self._seconds = seconds
        self.url = url
        self._scheme, self._bucket, self._prefix = storage_parts(url)
        self._settings = settings
        try:
            import obstore  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise StoreError(f"storage = {url!r} needs obstore ({error}): {install_hint('objects')}") from error
        self._library: Any = obstore
        self._folder = Path(unquote(urlsplit(url).path)) if self._scheme == "file" else None
        if self._folder is not None and not self._folder.is_dir():
            raise StoreError(f"storage: there is no folder {self._folder}: mount or make it, or name another one")
        self._folder_id = None if self._folder is None else _identity(self._folder)
        try:
            self._store = self._opened()
        except Exception as error:
            check = f": check {_KEYS_OF[self._scheme]} and [objects]" if self._scheme in _KEYS_OF else ""
            raise StoreError(f"storage = {url!r} cannot be used: {_first_line(error)}{check}") from error

    def _opened(self) -> ObjectStore:
        from obstore import store  # noqa: PLC0415 - an extra

        if self._folder is not None:
            return store.LocalStore(prefix=self._folder, automatic_cleanup=True)
        settings = self._settings
        common: dict[str, Any] = {
            "client_options": {
                "timeout": timedelta(seconds=settings.request_s),
                "connect_timeout": timedelta(seconds=min(5.0, settings.request_s)),
                "allow_http": bool(settings.endpoint and settings.endpoint.startswith("http://")),
                **({} if settings.ca_file is None else {"root_certificate": settings.ca_file.read_bytes()}),
            },
            "retry_config": {"max_retries": 0},  # `_tried` does it, for all kinds of requests
        }
        if settings.endpoint:
            common["base_url" if self._scheme == "gs" else "endpoint"] = settings.endpoint.rstrip("/")
        if settings.region and self._scheme == "s3":
            common["region"] = settings.region
        kind: Any = {"gs": store.GCSStore, "az": store.AzureStore, "s3": store.S3Store}[self._scheme]
        opened: ObjectStore = kind(self._bucket, prefix=self._prefix or None, **common)
        return opened

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = False) -> None:
        """Write an object. durable: in a folder, it survives a power cut; other stores promise that themselves."""
        self._tried(f"put {key}", lambda: self._library.put(self._store, key, data, use_multipart=False))
        if durable and self._folder is not None:
            fsync_path(self._folder / key)
            fsync_path((self._folder / key).parent)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """An object's bytes from `start` on, all or `length`. Raises NoObject if it is not there, or is shorter."""

        def read() -> bytes:
            if length is None and not start:
                return bytes(self._library.get(self._store, key).bytes())
            end = None if length is None else start + length
            return bytes(self._library.get_range(self._store, key, start=start, end=end))

        data = self._tried(f"get {key}", read)
        if length is not None and len(data) != length:
            raise NoObject(f"expected {length} bytes of the object {key} from {start} on, got {len(data)}")
        return data

    def keys(self, folder: str) -> list[tuple[str, int]]:
        """Keys and sizes of the objects in a folder and the folders in it; "": all."""

        def listed() -> list[tuple[str, int]]:
            batches = self._library.list(self._store, f"{folder}/" if folder else None)
            return [(entry["path"], entry["size"]) for batch in batches for entry in batch]

        return self._tried(f"list {folder or 'all objects'}", listed)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        for first in range(0, len(keys), AT_ONCE):
            batch = list(keys[first : first + AT_ONCE])
            self._tried(f"delete {counted(len(batch), 'object')}", lambda batch=batch: self._delete(batch))  # type: ignore[misc]

    def remove_temporary(self) -> None:
        """Remove what killed processes left of unfinished writes. Only a folder has such files."""
        if self._folder is not None:
            for path in self._folder.rglob("*#*"):
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _delete(self, keys: list[str]) -> None:
        try:
            self._library.delete(self._store, keys)
        except FileNotFoundError:
            if len(keys) == 1:
                return
            for key in keys:  # a folder reports one that is missing, and leaves the others to chance
                self._delete([key])

    def _tried(self, doing: str, request: Callable[[], R]) -> R:
        """The result of a request, measured."""
        began, result = time.monotonic(), "failed"
        try:
            answer = self._repeated(doing, request)
            result = "ok"
        except NoObject:
            result = "missing"
            raise
        finally:
            if self._seconds is not None:
                self._seconds.labels(doing.partition(" ")[0], result).observe(time.monotonic() - began)
        return answer

    def _repeated(self, doing: str, request: Callable[[], R]) -> R:
        """The result of a request, which is repeated within `retry_s` seconds while the store fails or is busy."""
        until = time.monotonic() + self._settings.retry_s
        for wait in _waits():
            try:
                self._check_folder()
                return request()
            except FileNotFoundError as error:
                if self._no_bucket(doing, error):
                    raise self._unavailable(doing, error) from error
                raise NoObject(f"could not {doing}: there is no such object in {self.url}") from error
            except Exception as error:  # the library has many kinds
                if not _passes(error) or time.monotonic() + wait > until:
                    raise self._failure(doing, error) from error
            time.sleep(wait)
        raise AssertionError("unreachable")

    def _has_folder(self) -> bool:
        """Whether the folder is the one that was opened. The library would make a missing one, below a mount point."""
        try:
            return self._folder is None or _identity(self._folder) == self._folder_id
        except OSError:
            return False

    def _check_folder(self) -> None:
        if not self._has_folder():
            raise FileNotFoundError(f"there is no folder {self._folder}")

    def _failure(self, doing: str, error: Exception) -> StoreError:
        number = _ERRNO.search(str(error))
        if number is not None and int(number[1]) in FULL_ERRNOS:
            return disk_error(f"{doing} in {self.url}", int(number[1]), _first_line(error))
        return self._unavailable(doing, error)

    def _no_bucket(self, doing: str, error: Exception) -> bool:
        """Whether bucket or folder are missing. Without a code a read or removal may as well lack its object."""
        if self._folder is not None:
            return not self._has_folder()
        asked = not any(words in str(error) for words in (*_METADATA_SERVICES, *_NOT_AUTHENTICATED))
        missing = asked and _status(error) == 404 and doing.startswith(("put", "list"))
        return missing or _code(error) in _NO_BUCKET

    def _unavailable(self, doing: str, error: Exception) -> StoreUnavailable:
        if self._no_bucket(doing, error):
            kind = "container" if self._scheme == "az" else "bucket"
            what = f"{kind} {self._bucket!r}" if self._folder is None else f"folder {self._folder}"
            why = f"there is no {what}: make it, or correct `storage`"
        else:
            why = self._why(error)
        return StoreUnavailable(f"could not {doing} in {self.url}: {why}; what was stored stays valid")

    def _why(self, error: Exception) -> str:
        """What is wrong, and what to do; without the error's details, which have keys."""
        text, status, code = str(error), _status(error), _code(error)
        variables = _KEYS_OF.get(self._scheme, "")
        if any(service in text for service in _METADATA_SERVICES):
            return f"there are no credentials: set {variables} in the coordinator's environment, or give it a role"
        refused = status is not None and status < 500 and any(words in text for words in _NOT_AUTHENTICATED)
        if code in _WRONG_KEYS or status == 401 or refused:
            return f"the store refuses the credentials ({code or status}): check {variables}"
        if status == 403 or code == _DENIED:
            return f"access is denied ({code or status}): these credentials need to get, put, list and delete there"
        if status is not None:
            tried = f" after {self._settings.retry_s:g} s of tries" if _passes(error) else ""
            return f"the store answers {status} {code}".rstrip() + tried
        account = ", AZURE_STORAGE_ACCOUNT_NAME" if self._scheme == "az" else ""
        return f"{_first_line(error)}: check the network{account} and objects.endpoint"


def check_access(bucket: Bucket) -> None:
    """Put, get, list and delete an object. Raises StoreError, with what is wrong and what to do."""
    key, data = f"access-check/{random.getrandbits(64):x}", b"written by fl-server, and removed by it"
    bucket.put(key, data)
    if bucket.get(key, 11, 9) != data[11:20] or key not in dict(bucket.keys("access-check")):
        raise StoreError(f"expected the object {key} in {bucket.url} as it was written, got another one or none")
    bucket.delete([key])


def _identity(folder: Path) -> tuple[int, int]:
    """Device and number of a folder. Raises OSError."""
    found = folder.stat()
    return found.st_dev, found.st_ino


def _waits() -> Iterator[float]:
    """Waits between tries, in seconds: doubling, each shortened at random, so that many do not come together."""
    wait = FIRST_WAIT_S
    while True:
        yield wait * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        wait = min(2 * wait, LONGEST_WAIT_S)


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _code(error: Exception) -> str:
    found = _CODE.search(str(error))
    return found[1] or found[2] if found else ""


def _passes(error: Exception) -> bool:
    """Whether a repeated request may succeed."""
    number = _ERRNO.search(str(error))
    if isinstance(error, PermissionError) or (number is not None and int(number[1]) in FULL_ERRNOS):
        return False
    if type(error).__name__ in _FINAL or _code(error) == _DENIED:
        return False
    if any(service in str(error) for service in _METADATA_SERVICES):
        return False
    status = _status(error)
    return status is None or status >= 500 or status in _AGAIN


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


REQUESTS = 8
"""Requests at a time, and so the parts in memory."""
_FETCHED = ".fetched-"
_TRIES = 2
"""Reads of a part with a wrong digest: the first one may have been damaged on its way."""


class DamagedObject(StoreUnavailable):
    """An object that counts is gone or has other bytes than were written. It may be restored while a run waits."""


class ObjectReader:
    """Reads the files of one ledger. Blocking and thread-safe; raises StoreUnavailable while the store fails."""

    def __init__(self, bucket: Bucket, root: str) -> None:
        """root: the id of the ledger."""
        self.bucket, self.root = bucket, root
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="objects")

    def fetch(self, file: StoredFile, path: Path) -> None:
        """Make a local file from its parts. Raises DamagedObject."""
        make_folders(path.parent, durable=False)
        temporary, hasher = path.with_name(f"{_FETCHED}{threading.get_ident()}-{path.name}"), blake3()
        with disk_errors(f"write {path}"):
            try:
                with temporary.open("wb") as made:
                    for first in range(0, len(file.parts), REQUESTS):
                        for data in self._pool.map(partial(self.part, file.name), file.parts[first : first + REQUESTS]):
                            made.write(data)
                            hasher.update(data)
                if hasher.digest() != file.digest:
                    raise self._damaged(file.name, "it has another digest as a whole")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def part(self, name: str, part: str) -> bytes:
        """A part from the store, with its digest checked. Raises DamagedObject."""
        why = ""
        for _ in range(_TRIES):
            try:
                data = self.bucket.get(self._key(f"{name}/{part}"))
            except NoObject as error:
                why = str(error)
                continue
            if part.endswith(f".{blake3(data).hexdigest()}"):
                return data
            why = f"part {part} has another digest than its name"
        raise self._damaged(name, why)

    def _damaged(self, name: str, why: str) -> DamagedObject:
        return DamagedObject(f"{name} in {self.bucket.url} is damaged: {why}; restore it from the store's own versions")

    def close(self) -> None:
        """End the threads. What they have not put is put again later."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _key(self, key: str) -> str:
        return f"{self.root}/{key}"
