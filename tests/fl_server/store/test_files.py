"""Files of the state directory."""

from pathlib import Path

import pytest
from blake3 import blake3

from fl_server.store import errors


def test_the_digest_of_a_file_does_not_depend_on_the_size_of_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading three bytes at a time gives the digest of the whole file."""
    monkeypatch.setattr(errors, "_BLOCK_BYTES", 3)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(10)))
    assert errors.file_digest(path) == blake3(bytes(range(10))).digest()
