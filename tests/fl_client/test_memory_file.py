"""Client states in bytes."""

from __future__ import annotations

import pytest
import torch

from fl_client.memory_file import Damaged, decode, encode, read_facts

MEMORIES = [
    {"c_i": {"w": torch.ones(2, 3), "a/b.bias": torch.zeros((), dtype=torch.float64)}},
    {"A_i": {"L": torch.ones(5), "q": torch.arange(5)}, "h_i": {"w": torch.eye(2).t().to(torch.bfloat16)}},
    {},
]


@pytest.fixture
def path(tmp_path):
    """A file of three memories with unlike shapes and dtypes."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(map(bytes, encode(b"facts", MEMORIES))))
    return path


def test_memories_come_back_as_they_were(path):
    """Symbols, names, their order, shapes, dtypes and bits; a name may hold what parts a path."""
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


def test_facts_are_read_without_the_tensors(path):
    """What a registration asks for every file."""
    with path.open("rb") as file:
        assert read_facts(file) == b"facts"


def test_no_byte_can_change_and_none_can_miss(path):
    """Each byte turned over, and each shorter file, is found out."""
    data = path.read_bytes()
    changed = [data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :] for i in range(len(data))]
    for wrong in (*changed, *(data[:i] for i in range(len(data))), data + b"\0"):
        path.write_bytes(wrong)
        with path.open("rb") as file, pytest.raises(Damaged):
            decode(file, 3)


def test_more_memories_than_expected_are_damage(path):
    """A file of another kind with a right digest is not taken for this one."""
    with path.open("rb") as file, pytest.raises(Damaged, match="expected client states"):
        decode(file, 1)
