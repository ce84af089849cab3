"""Monitoring programs for a test: each on a free port of loopback, ended with the test."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.processes.process import TIMEOUT_S, eventually

UNTIL_WE_ARE_GONE = 'exec 3<&0; (read -r ended <&3 || kill $$) & exec "$@" 3<&-'
"""The program ends when its stdin closes, also if the tests are killed. A line on stdin means that it has ended."""


def needed(*programs: str) -> None:
    """Skip the test if one of the programs is not installed; the reason names its package."""
    for program in programs:
        if shutil.which(program) is None:
            package = "prometheus-alertmanager" if program in ("prometheus-alertmanager", "amtool") else "prometheus"
            pytest.skip(f"{program} is not installed: it comes with Debian's package {package}")


@contextmanager
def listening(command: Sequence[str], log: Path) -> Iterator[str]:
    """Run a program that listens on 127.0.0.1:0; yields its address. It ends with the block.

    The port is read from its log, so no other program can have taken it.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["sh", "-c", UNTIL_WE_ARE_GONE, "sh", *command],
            cwd=log.parent, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:

        def listens() -> re.Match[str] | None:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}:\n{log.read_text()}"
            return re.search(r'msg="Listening on" address=(\S+)', log.read_text())

        address = eventually(listens, f"{command[0]} listens")[1]
        eventually(lambda: answers(address), f"{command[0]} is ready")
        yield address
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        process.communicate(b"ended\n")


def api(address: str, path: str, parameters: Mapping[str, str | Sequence[str]] | None = None) -> Any:
    """The `data` of a response of the HTTP API. Raises AssertionError with the message of a refusal."""
    query = urlencode(parameters or {}, doseq=True)
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{query}", timeout=TIMEOUT_S) as answer:
            content = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{path} {parameters}: {json.load(error)['error']}") from None
    assert content["status"] == "success", content
    return content["data"]


def answers(address: str) -> bool:
    """Whether the program at an address is ready."""
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=TIMEOUT_S):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False
