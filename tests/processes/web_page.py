"""`fl web` as a process, its pages and its event streams."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit

from tests.processes.process import ROOT, TIMEOUT_S, eventually


@dataclass(frozen=True)
class Answer:
    """An answer of HTTP."""

    status: int
    text: str
    headers: Message
    """Names in any case."""


@dataclass
class EventStream:
    """An open stream: a thread collects its events."""

    response: HTTPResponse
    events: list[tuple[str, str, Any]] = field(default_factory=list)
    """(name, id, data), the oldest first. An event without an id has the last one before it."""

    def read(self) -> None:
        """Collect events until the stream ends."""
        name, number = "", ""
        try:
            for line in self.response:
                key, _, value = line.decode().rstrip("\n").partition(": ")
                if key == "event":
                    name = value
                elif key == "id":
                    number = value
                elif key == "data":
                    self.events.append((name, number, json.loads(value)))
        except (OSError, ValueError, AttributeError):
            return  # closed by the test

    def named(self, name: str) -> list[Any]:
        """Data of the events with this name."""
        return [data for event, _, data in list(self.events) if event == name]

    def entries(self) -> list[int]:
        """Numbers of the entries of the history that came, in order."""
        return [row["number"] for rows in self.named("entries") for row in rows]


class WebPage:
    """`fl web` for an admin address; a context manager."""

    def __init__(self, admin: str, folder: Path) -> None:
        self._errors = (folder / "web.err").open("ab")
        command = [sys.executable, "-m", "fl_ops", "web", "--json", "--insecure", "--server", admin]
        self._process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0"],
            cwd=folder, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        link = urlsplit(self._link())
        self.address = f"{link.scheme}://{link.netloc}"
        self.cookie = self._log_in(link.path, link.query)

    def _log_in(self, path: str, form: str) -> str:
        """Send the form of the login link. Returns the cookie."""
        connection = HTTPConnection(self.address.removeprefix("http://"), timeout=TIMEOUT_S)
        connection.request("POST", path, form, {"Origin": self.address})
        response = connection.getresponse()
        assert response.status == 303, response.read()
        cookie = str(response.getheader("set-cookie")).partition(";")[0]
        connection.close()
        return cookie

    def _link(self) -> str:
        text = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text += line
            if found := re.search(r'"link": "([^"]*)"', text):
                return found.group(1)
        raise AssertionError(f"fl web ended with {self._process.wait()} and printed no link: {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; fails if it does not end by itself."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(TIMEOUT_S)
            finally:
                self._process.kill()
        self._errors.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def get(self, path: str, **headers: str) -> Answer:
        """An answer with any status."""
        request = urllib.request.Request(self.address + path, headers={**headers, "Cookie": self.cookie})  # noqa: S310 - our own address
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310 - our own address
                return Answer(response.status, response.read().decode(errors="replace"), response.headers)
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode(), error.headers)

    def until(self, path: str, holds: str) -> str:
        """Wait until a page has this text; returns the page."""

        def probe() -> str | None:
            answer = self.get(path)
            return answer.text if holds in answer.text else None

        return eventually(probe, f"{path} shows {holds!r}")

    @contextmanager
    def stream(self, path: str, **headers: str) -> Iterator[EventStream]:
        """An event stream, for as long as the block lasts."""
        request = urllib.request.Request(self.address + path, headers={**headers, "Cookie": self.cookie})  # noqa: S310 - our own address
        response = cast(HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT_S))  # noqa: S310 - our own address
        stream = EventStream(response)
        thread = threading.Thread(target=stream.read, daemon=True)
        thread.start()
        try:
            yield stream
        finally:
            response.fp.raw._sock.shutdown(2)  # type: ignore[attr-defined]  # wakes the thread
            thread.join(TIMEOUT_S)
            response.close()
