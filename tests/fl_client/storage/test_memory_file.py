"""Client states in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_client.storage.client_state_store import Damaged, decode, encode, read_metadata

MEMORIES = [
    {"c_i": {"w": torch.ones(2, 3), "a/b.bias": torch.zeros((), dtype=torch.float64)}},
    {"A_i": {"L": torch.ones(5), "q": torch.arange(5)}, "h_i": {"w": torch.eye(2).t().to(torch.bfloat16)}},
    {},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three memories with unlike shapes and dtypes."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(map(bytes, encode(b"facts", MEMORIES))))
    return path


def test_memories_are_read_back_unchanged(path: Path) -> None:
    """Symbols, names, their order, shapes, dtypes and bits stay; a name may have path separators."""
    with path.open("rb") as file:
        facts, got = decode(file, 3)
    assert facts == b"facts"
    assert [[list(named) for named in memory.values()] for memory in got] == [
        [["w", "a/b.bias"]],
        [["L", "q"], ["w"]],
        [],
    ]
    for memory, expected in zip(got, MEMORIES, strict=True):
        torch.testing.assert_close(memory, expected, rtol=0, atol=0)


def test_facts_are_read_without_the_tensors(path: Path) -> None:
    """A registration needs only the facts of every file."""
    with path.open("rb") as file:
        assert read_metadata(file) == b"facts"


def test_no_byte_can_change_and_none_can_miss(path: Path) -> None:
    """Each inverted byte and each shorter file is detected."""
    data = path.read_bytes()
    changed = [data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :] for i in range(len(data))]
    for wrong in (*changed, *(data[:i] for i in range(len(data))), data + b"\0"):
        path.write_bytes(wrong)
        with path.open("rb") as file, pytest.raises(Damaged):
            decode(file, 3)


def test_more_memories_than_expected_are_damage(path: Path) -> None:
    """A file of another kind with a right digest is refused."""
    with path.open("rb") as file, pytest.raises(Damaged, match="client states: "):
        decode(file, 1)
