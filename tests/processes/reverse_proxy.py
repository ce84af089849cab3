"""nginx on loopback with the `server` block of docs/operation/web.md, for tests. They are skipped without nginx."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fl_ops.admin.settings import Certificates
from tests.processes.process import ROOT, TIMEOUT_S, eventually

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
_AROUND = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""


def documented_server() -> str:
    """The `server` block of docs/operation/web.md."""
    (block,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "operation" / "web.md").read_text(), re.DOTALL)
    return str(block)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def nginx(folder: Path, port: int, upstream: str, files: Certificates) -> Iterator[None]:
    """Serve https at 127.0.0.1:port as docs/operation/web.md describes it, for as long as the block lasts.

    upstream: the coordinator's `web_listen`. files: the certificate of nginx, of the authority of the coordinator too.
    """
    server = documented_server()
    own = {
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "127.0.0.1:7080": upstream,
        "server_name fl.example.org;": "server_name localhost;",
        "/etc/nginx/fl.example.org.crt": str(files.cert),
        "/etc/nginx/fl.example.org.key": str(files.key),
        "/etc/nginx/page-ca.crt": str(files.ca),
        "proxy_ssl_name page.example.org;": "proxy_ssl_name localhost;",
    }
    for documented, here in own.items():
        assert documented in server, f"docs/operation/web.md: expected {documented!r} in the block for nginx"
        server = server.replace(documented, here)
    with serving_http(folder, port, server):
        yield


@contextmanager
def serving_http(folder: Path, port: int, http: str) -> Iterator[None]:
    """Run nginx with what is in its block `http`, which listens at the port. Skips the test where nginx is missing."""
    if NGINX is None:
        pytest.skip("nginx is not installed: `make tools` installs Debian's")
    (folder / "nginx.conf").write_text(_AROUND.format(folder=folder, server=http))
    with _serving(folder, port):
        yield


_STREAM = """
load_module {module};
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 64; }}
{block}
"""
_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


@contextmanager
def passthrough(folder: Path, port: int, upstream: str) -> Iterator[None]:
    """Pass TLS for coordinator.example.org from 127.0.0.1:port on, as docs/devices/network.md describes it."""
    if NGINX is None or not _MODULE.exists():
        pytest.skip("nginx with its module `stream` is not installed: `make tools` installs Debian's")
    (block,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "devices" / "network.md").read_text(), re.DOTALL)
    for documented, here in {"listen 443;": f"listen 127.0.0.1:{port};", "10.0.0.5:7070": upstream}.items():
        assert documented in block, f"docs/devices/network.md: expected {documented!r} in the block for nginx"
        block = block.replace(documented, here)
    (folder / "nginx.conf").write_text(_STREAM.format(module=_MODULE, folder=folder, block=block))
    with _serving(folder, port):
        yield


@contextmanager
def _serving(folder: Path, port: int) -> Iterator[None]:
    """Run nginx with the folder's nginx.conf. It listens at the port."""
    assert NGINX is not None
    config = folder / "nginx.conf"
    with (folder / "nginx.out").open("wb") as output:
        process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(config)], stdout=output, stderr=output)

    def listens() -> bool:
        assert process.poll() is None, (folder / "nginx.out").read_text() + (folder / "error.log").read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    try:
        eventually(listens, "nginx listens")
        yield
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
