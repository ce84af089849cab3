"""A byte order mark, as editors on Windows write it, in every file that a person writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_client.policy.config import read_policy
from fl_client.settings.config import load_config
from fl_common.certificates.pem import PemFiles
from fl_common.settings import BYTE_ORDER_MARK, read_settings
from fl_ops.admin.settings import Token, from_file
from fl_ops.files import read_run
from fl_server.settings.config import ServerConfig
from tests.processes.certificates import Pki

CLIENT = (
    'client_id = "edge"\nserver = "127.0.0.1:7070"\nstate_dir = "edge"\ninsecure = true\ntask = { name = "digits" }\n'
)
READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "server": (lambda path: read_settings(path, ServerConfig), 'state_dir = "x"\ninsecure = true\n'),
    "client": (load_config, CLIENT),
    "policy": (read_policy, 'tasks = { allow = ["digits"] }\n'),
    "run": (read_run, 'task = { name = "digits" }\n'),
    "fl": (from_file, 'server = "127.0.0.1:7071"\n'),
    "token": (lambda path: Token(path, path).read(), "a.b.c\n"),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_byte_order_mark_changes_nothing(tmp_path: Path, kind: str) -> None:
    """The file reads as without it."""
    read, text = READERS[kind]
    path = tmp_path / "file"
    found = []
    for prefix in (b"", BYTE_ORDER_MARK):
        path.write_bytes(prefix + text.encode())
        path.chmod(0o600)
        found.append(read(path))
    assert found[0] == found[1]


def test_certificates_and_keys(tmp_path: Path) -> None:
    """A library that looks for lines would pass over the first certificate of a bundle."""
    files = Pki(tmp_path / "pki").issue("client", "edge")
    plain = PemFiles(files.cert, files.key, files.ca).read()
    for path in (files.cert, files.key, files.ca):
        path.write_bytes(BYTE_ORDER_MARK + path.read_bytes())
    assert PemFiles(files.cert, files.key, files.ca).read() == plain
