"""The hash of a row: unambiguous, and the one that the documentation gives."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_common.audit import FIELDS, START, AuditRow, Head, limited
from tests.fl_common.audit.chains import a_chain, a_row

TEXT = {name: st.text(max_size=6) for name in FIELDS[2:]}
ROWS = st.builds(AuditRow, st.integers(0, 99), st.integers(0, 99), **TEXT)


def test_a_hash_is_the_documented_one() -> None:
    """Worked out by hand: lengths of four bytes, numbers as text, behind 32 zero bytes."""
    row = AuditRow(1, 5, "op:a", "", "M", "s", "ok", "ä")
    encoded = b"\0\0\0\x011\0\0\0\x015\0\0\0\x04op:a\0\0\0\0\0\0\0\x01M\0\0\0\x01s\0\0\0\x02ok"
    assert row.linked(START.hash) == hashlib.sha256(bytes(32) + encoded + b"\0\0\0\x02\xc3\xa4").digest()


@given(ROWS, ROWS)
def test_two_rows_with_the_same_hash_are_the_same(one: AuditRow, other: AuditRow) -> None:
    """No text can be moved from one field to the next."""
    assert (one == other) == (one.linked(START.hash) == other.linked(START.hash))


def test_a_moved_text_changes_the_hash() -> None:
    """The same characters in other fields."""
    row = replace(a_row(1), subject="ab", result="c")
    assert row.linked(START.hash) != replace(row, subject="a", result="bc").linked(START.hash)


@given(ROWS)
def test_a_line_of_json_keeps_the_row(row: AuditRow) -> None:
    """An export has everything that the hash needs."""
    row = replace(row, hash=row.linked(START.hash))
    assert AuditRow.from_json(row.to_json().encode()) == row


@pytest.mark.parametrize(
    "line",
    [
        "[]", "{}", "x", "", "null", "[" * 100_000,
        a_chain(1)[0].to_json().replace('"number":1', '"number":"1"'),
        a_chain(1)[0].to_json().replace('"number":1', '"number":true'),
        a_chain(1)[0].to_json().replace('"number":1', '"number":-1'),
        a_chain(1)[0].to_json().replace('"hash":"', '"hash":"x'),
    ],
)  # fmt: skip
def test_a_line_that_is_no_row_is_refused(line: str) -> None:
    """A file may be anything."""
    with pytest.raises((ValueError, RecursionError)):
        AuditRow.from_json(line)


def test_text_of_others_is_limited_and_printable() -> None:
    """NUL, which PostgreSQL refuses, line breaks, and lone surrogates, which are no UTF-8."""
    fields = {**dict.fromkeys(FIELDS[2:], ""), "detail": "a\0b\n\ud800", "subject": "x" * 300}
    found = limited(fields)
    assert found["detail"] == "a\\x00b\\n\\ud800"
    assert len(found["subject"]) == 256
    assert found["subject"].endswith("...")


def test_a_head_is_read_back() -> None:
    """`--head` takes what was printed."""
    head = a_chain(3)[-1].head
    assert Head.parse(f" {head}\n") == head


@pytest.mark.parametrize("text", ["", "3", "3:", "3:ab", "x:" + "ab" * 32, "-1:" + "ab" * 32, "²:" + "ab" * 32])
def test_a_head_that_is_none_is_refused(text: str) -> None:
    """Before anything is compared with it."""
    with pytest.raises(ValueError, match=r"NUMBER:HASH|hex"):
        Head.parse(text)
