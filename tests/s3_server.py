"""An S3 server for tests: OpenStack Swift with its s3api, in a temporary folder, on loopback.

Swift checks signatures, so a wrong secret is refused. Its four programs end when their standard input does, so also
when the tests are killed. `apt-get install swift-proxy swift-account swift-container swift-object` installs them.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from urllib.error import HTTPError

import pytest

TIMEOUT_S = 120.0
KEY, SECRET, REGION = "test:key", "secret-of-the-tests", "us-east-1"
OTHER_KEY, OTHER_SECRET = "test:other", "another-secret-of-the-tests"
"""A user without rights."""

_SERVERS = ("account", "container", "object")
_RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, port in zip(sys.argv[2::2], sys.argv[3::2]):
    builder = RingBuilder(2, 1, 1)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d", "weight": 1,
                     "replication_ip": "127.0.0.1", "replication_port": int(port), "meta": ""})
    builder.rebalance()
    builder.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz")
"""
_PROXY = f"""
[pipeline:main]
pipeline = catch_errors cache s3api tempauth proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
error_suppression_limit = 1000000
[filter:tempauth]
use = egg:swift#tempauth
user_test_key = {SECRET} .admin
user_test_other = {OTHER_SECRET}
[filter:s3api]
use = egg:swift#s3api
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
"""
_UNTIL_WE_ARE_GONE = """
for name in account container object proxy; do swift-$name-server "$1/$name.conf" & started="$started $!"; done
read -r never; kill $started; wait
"""


class S3Server:
    """A running server."""

    scheme = "s3"

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self._names = (f"bucket{number}" for number in count())

    @property
    def environment(self) -> Mapping[str, str]:
        """The credentials, as the coordinator takes them."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    def new_bucket(self) -> str:
        """The name of a new bucket."""
        from obstore import sign  # noqa: PLC0415 - an extra
        from obstore.store import S3Store  # noqa: PLC0415 - an extra

        name = next(self._names)
        store = S3Store(
            name, endpoint=self.endpoint, access_key_id=KEY, secret_access_key=SECRET, region=REGION,
            client_options={"allow_http": True},
        )  # fmt: skip
        url = sign(store, "PUT", "", timedelta(seconds=60))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=TIMEOUT_S) as answer:  # noqa: S310 - ours
            assert answer.status == 200
        return name


@contextmanager
def running() -> Iterator[S3Server]:
    """A server that ends with the block. Skips the test where Swift or obstore is not installed."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")
    python = shutil.which("python3", path="/usr/bin")
    if python is None or not all(shutil.which(f"swift-{name}-server") for name in (*_SERVERS, "proxy")):
        pytest.skip("no S3 server is installed: swift-proxy, -account, -container and -object are not on the path")
    with tempfile.TemporaryDirectory(prefix="s3-") as name:
        folder = Path(name)
        ports = _configured(folder)
        environment = {**os.environ, "SWIFT_CONF_DIR": name}
        environment.pop("PYTHONPATH", None)
        rings = [part for server in _SERVERS for part in (server, str(ports[server]))]
        made = subprocess.run(
            [python, "-c", _RINGS, name, *rings], env=environment, check=False, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        with (folder / "log").open("wb") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                ["sh", "-c", _UNTIL_WE_ARE_GONE, "sh", name], stdin=subprocess.PIPE, stdout=log, stderr=log,
                env=environment,
            )  # fmt: skip
        try:
            yield _answering(S3Server(ports["proxy"]), process, folder / "log")
        finally:
            process.communicate(timeout=TIMEOUT_S)


def _configured(folder: Path) -> dict[str, int]:
    """Write the settings of all programs. Returns their ports."""
    ports = {name: free_port() for name in (*_SERVERS, "proxy")}
    (folder / "devices" / "d").mkdir(parents=True)
    storage = "[storage-policy:0]\nname = one\ndefault = yes\n"
    (folder / "swift.conf").write_text(f"[swift-hash]\nswift_hash_path_suffix = tests\n{storage}")
    for name, port in ports.items():
        common = f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {port}\nworkers = 0\nswift_dir = {folder}\nuser = root\n"
        server = f"mount_check = false\ndevices = {folder}/devices\n[pipeline:main]\npipeline = {name}-server\n"
        app = f"[app:{name}-server]\nuse = egg:swift#{name}\n"
        (folder / f"{name}.conf").write_text(common + (_PROXY if name == "proxy" else server + app))
    return ports


def free_port() -> int:
    """A port that nobody gets as the local end of a connection: below those that Linux gives out."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _answering(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> S3Server:
    ends = time.monotonic() + TIMEOUT_S
    while True:
        try:
            server.new_bucket()
        except OSError as error:
            said = f"{error.read()!r}" if isinstance(error, HTTPError) else str(error)
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends, f"{said}, {log.read_text()}"
            time.sleep(0.1)
        else:
            return server
