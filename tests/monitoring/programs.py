"""The monitoring's own programs, started for a test: each on a free port of loopback, and gone when the test is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import pytest

PATIENCE_S = 60.0
"""Until a test gives up: for a machine that is busy with others, never a claim about speed."""
UNTIL_WE_ARE_GONE = 'exec 3<&0; (read -r ended <&3 || kill $$) & exec "$@" 3<&-'
"""The program ends when its stdin does, so also when the tests are killed. A line on stdin says that it has ended."""

T = TypeVar("T")


def needed(*programs: str) -> None:
    """Skip the test where one of the programs is not installed, and say which package has it."""
    for program in programs:
        if shutil.which(program) is None:
            package = "prometheus-alertmanager" if program in ("prometheus-alertmanager", "amtool") else "prometheus"
            pytest.skip(f"{program} is not installed: it comes with Debian's package {package}")


def eventually(probe: Callable[[], T | None], what: str, within_s: float = PATIENCE_S) -> T:
    """The first true value of `probe`, asked again and again; fails with `what` when none came in time."""
    ends = time.monotonic() + within_s
    while not (value := probe()):
        assert time.monotonic() < ends, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
    return value


@contextmanager
def listening(command: Sequence[str], log: Path) -> Iterator[str]:
    """Run a program that was told to listen on 127.0.0.1:0; its address, and its end with the block.

    It says its port in its log, so no other program can have taken the port meanwhile.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["sh", "-c", UNTIL_WE_ARE_GONE, "sh", *command],
            cwd=log.parent, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:

        def told() -> re.Match[str] | None:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}:\n{log.read_text()}"
            return re.search(r'msg="Listening on" address=(\S+)', log.read_text())

        address = eventually(told, f"{command[0]} listens")[1]
        eventually(lambda: answers(address), f"{command[0]} is ready")
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.communicate(b"ended\n")


def api(address: str, path: str, parameters: Mapping[str, str | Sequence[str]] | None = None) -> Any:
    """The `data` of an answer of the HTTP API; what it refuses is an AssertionError with its own words."""
    query = urlencode(parameters or {}, doseq=True)
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{query}", timeout=PATIENCE_S) as answer:
            content = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{path} {parameters}: {json.load(error)['error']}") from None
    assert content["status"] == "success", content
    return content["data"]


def answers(address: str) -> bool:
    """Whether somebody is there who is ready."""
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=PATIENCE_S):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False
