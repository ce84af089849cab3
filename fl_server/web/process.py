"""Keeps the process that serves the web page running, gives it its settings, and ends it with the coordinator.

The process ends when its standard input is closed, so it ends with the coordinator after SIGKILL too. The coordinator
holds the listening socket: a browser that connects while the process is started again waits, and is not refused. While
the process cannot start, a much simpler one (`unavailable.py`) answers between two tries. Its settings, with the page's
certificate, are one line of JSON on its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import structlog
from cryptography import x509
from prometheus_client import Counter

from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher
from fl_common.extras import install_hint
from fl_common.settings import SettingsError, split_address
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import TlsConfig, WebTlsConfig

log = structlog.get_logger()

_PACKAGES = ("starlette", "uvicorn", "jinja2")
_LONGEST_PATH = 100
"""Bytes of the path of a Unix socket; Linux allows 107."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between an end of the process and its next start; twice as long each time."""
ANSWERED_PAUSE_S = 2.0
"""Browsers are answered in a pause of this length: the process has ended three times in a row."""
STEADY_S = 60.0
"""The next pause is the first one again when the process has run this long."""
STOP_S = 2.0
"""The process is killed if it has not ended after this time."""
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables of the environment that the process gets. Others may be secrets of the coordinator."""
_UNAVAILABLE = ("-I", str(Path(__file__).with_name("unavailable.py")))


class PageCertificate:
    """The files of `[web_tls]`. `poll` is for one thread; any thread may read the others."""

    def __init__(self, own: WebTlsConfig, tls: TlsConfig, coordinator: PemWatcher) -> None:
        """Read the files. Raises SettingsError for files that cannot be used.

        coordinator: the files of `[tls]` in use.
        """
        self._coordinator, self._min_version = coordinator, tls.min_version
        files = PemFiles(own.cert, own.key, None, section="web_tls")
        self._files = PemWatcher(files, self._check)
        files.valid_now(self._files.pem)
        page, theirs = self._files.pem.leaf, coordinator.pem.leaf
        if page.issuer == theirs.issuer and (hosts := _hosts(page) & _hosts(theirs)):
            todo = "web_tls: use an authority that no device trusts; with this key one can pose as the coordinator"
            log.warning("page_has_the_coordinators_name", hosts=sorted(hosts), todo=todo)

    def poll(self) -> None:
        """Use renewed files. Blocking."""
        match self._files.poll():
            case PemChange.RENEWED:
                log.info("page_certificate_renewed", serial=f"{self._files.pem.leaf.serial_number:x}")
            case PemChange.UNUSABLE:
                log.warning(
                    "page_certificate_not_used", reason=self._files.problem, todo="the earlier one stays in use"
                )

    def values(self) -> Mapping[str, str | None]:
        """What the web process needs for TLS, as it is now."""
        pem, authorities = self._files.pem, self._coordinator.pem.ca
        return {
            "cert": pem.cert.decode("latin-1"),
            "key": pem.key.decode("latin-1"),
            "client_ca": None if authorities is None else authorities.decode("latin-1"),
            "min_version": self._min_version,
        }

    def _check(self, pem: Pem) -> None:
        if pem.leaf.public_key() == self._coordinator.pem.leaf.public_key():
            raise SettingsError("web_tls.key: expected a key of the page's own, got the key of [tls]")


def _hosts(leaf: x509.Certificate) -> set[str]:
    """The DNS names and addresses of a certificate."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}


@dataclass(frozen=True, slots=True)
class Page:
    """What the web process is given beside settings of the coordinator."""

    path: Path
    """Path of the coordinator's socket for it."""
    listening: int
    """File descriptor of the socket that browsers connect to."""
    secrets_key: bytes
    """Key by which it tells made-up codes and sessions (`fl_common/own_secrets.py`)."""
    tls: Mapping[str, str | None] | None
    """cert, key, client_ca as PEM, and min_version; None for a page in plain text."""


def page_url(config: ServerConfig, address: str) -> str:
    """The address of the page for people. address: where it listens."""
    return f"{'http' if config.tls is None else 'https'}://{config.web_address or address}"


def require_packages() -> None:
    """Raises SettingsError if the packages of the web page are not installed."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise SettingsError(
            f"web_listen: the web page needs {', '.join(missing)}, which is not installed: "
            f"{install_hint('web')}, or remove web_listen"
        )


def listening_socket(address: str) -> socket.socket:
    """A socket that listens; it stays open while its process is started again. Raises SettingsError."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(256)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise SettingsError(f"web_listen: cannot listen on {address}: {error.strerror}; choose another") from error
    return listening


def coordinator_socket(state: Path) -> Path:
    """The path of the Unix socket for the web process, in a folder that only its owner may enter."""
    folder = (state / "web").absolute()
    if len(str(folder).encode()) + len("/socket") > _LONGEST_PATH:
        raise SettingsError(
            f"web_listen: expected a state_dir whose path has at most {_LONGEST_PATH - len('/web/socket')} bytes, "
            f"because a Unix socket is made in it, got {state}"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder / "socket"


def line_for(config: ServerConfig, page: Page) -> bytes:
    """The settings of the web process."""
    hosts = [] if config.web_address is None else [split_address(config.web_address)[0]]
    values = {
        "socket": str(page.path),
        "listening": page.listening,
        "hosts": hosts,
        "has_login": config.operators_have_names,
        "secrets_key": page.secrets_key.hex(),
        "tls": page.tls,
    }
    return json.dumps(values).encode() + b"\n"


class WebProcess:
    """The supervised process. Lives on the event loop."""

    def __init__(self, settings: bytes, listening: int, ends: Counter) -> None:
        """settings: its first line of input, and a further one after each change. listening: what it serves.

        ends: counts the ends that nobody asked for.
        """
        self._settings, self._listening, self._ends = settings, listening, ends
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if none runs."""
        return None if self._process is None else self._process.pid

    def renew(self, settings: bytes) -> None:
        """Give these settings to the running process, and to each that is started later."""
        if settings == self._settings:
            return
        self._settings = settings
        if self._process is not None and (given := self._process.stdin) is not None and not given.is_closing():
            given.write(settings)

    async def run(self) -> None:
        """Keep the process running until this is cancelled."""
        pause = FIRST_PAUSE_S
        while True:
            began, code = time.monotonic(), None
            try:
                code = await self._serve()
            except OSError as error:  # no process, no memory, or no Python any more
                log.error("web_process_not_started", error=str(error))
            pause = FIRST_PAUSE_S if time.monotonic() - began >= STEADY_S else pause
            self._ends.inc()
            log.warning("web_process_ended", code=code, starts_again_in_s=pause)
            await self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _serve(self) -> int:
        """Start the process and wait for its end. Returns its exit code."""
        async with self._started(["-m", "fl_web"]) as process:
            self._process = process
            log.info("web_process_started", pid=process.pid)
            return await process.wait()

    async def _pause(self, seconds: float) -> None:
        """Wait until the next try. In a long pause browsers are answered that there is no page."""
        if seconds >= ANSWERED_PAUSE_S:
            try:
                async with self._started(_UNAVAILABLE):
                    return await asyncio.sleep(seconds)
            except OSError as error:
                log.error("web_process_not_started", error=str(error))
        return await asyncio.sleep(seconds)

    @asynccontextmanager
    async def _started(self, arguments: Sequence[str]) -> AsyncIterator[Process]:
        """A process of this Python with the settings as its input. It ends with the block."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", *arguments,  # -P: no module comes from the working directory
            stdin=PIPE, pass_fds=(self._listening,), env=_environment(), cwd="/",
            start_new_session=True,  # Ctrl-C in a terminal is for the coordinator, which ends it after the drain
        )  # fmt: skip
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        try:
            with suppress(ConnectionError):
                process.stdin.write(self._settings)
                await process.stdin.drain()
            yield process
        finally:
            process.stdin.close()
            await _end(process)


async def _end(process: Process) -> None:
    """Wait for the end of a process whose input is closed."""
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """Folders of modules are absolute, because the process works in another directory."""
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    folders = filter(None, passed.pop("PYTHONPATH", "").split(os.pathsep))
    return {**passed, "PYTHONPATH": os.pathsep.join(str(Path(folder).absolute()) for folder in folders)}
