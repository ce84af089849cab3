"""A broken chain is named at its row, with what happened to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from fl_common.audit import MOST_PROBLEMS, AuditRow, ChainCheck, Head, Problem, rows_of_lines
from tests.fl_common.audit.chains import a_chain, a_row, linked


def problems(rows: Iterable[AuditRow], *known: Head, newest: Head | None = None) -> list[Problem]:
    """What a check finds."""
    check = ChainCheck(known)
    for row in rows:
        check.add(row)
    return check.end(newest)


def test_a_whole_chain_has_no_problems() -> None:
    """Also none with its heads, and none if it is empty."""
    chain = a_chain(9)
    assert problems(chain, chain[3].head, chain[8].head, newest=chain[8].head) == []
    assert problems([], newest=Head(0, b"")) == []


@pytest.mark.parametrize("field", ["time_us", "actor", "address", "method", "subject", "result", "detail"])
def test_a_changed_field_is_found(field: str) -> None:
    """The row is named, and no other one."""
    chain = a_chain(9)
    changed: dict[str, Any] = {field: 7 if field == "time_us" else "other"}
    chain[4] = replace(chain[4], **changed)
    [(number, what)] = problems(chain)
    assert number == 5
    assert "row 5 was changed" in what


def test_a_changed_row_with_its_hash_is_found_at_the_next_one() -> None:
    """The next row has the old hash in its own."""
    chain = a_chain(9)
    chain[4] = replace(chain[4], actor="other")
    chain[4] = replace(chain[4], hash=chain[4].linked(chain[3].hash))
    [(number, what)] = problems(chain)
    assert number == 6
    assert "or row 5 with its hash" in what


def test_a_changed_hash_is_found() -> None:
    """The row and the next one do not match it."""
    chain = a_chain(9)
    chain[4] = replace(chain[4], hash=bytes(32))
    assert [number for number, _ in problems(chain)] == [5, 6]


def test_a_missing_row_is_found() -> None:
    """One, several, and the first."""
    chain = a_chain(9)
    assert problems([*chain[:4], *chain[5:]]) == [(5, "row 5 is missing")]
    assert problems([*chain[:4], *chain[7:]]) == [(5, "rows 5 to 7 are missing")]
    assert problems(chain[1:]) == [(1, "row 1 is missing")]


def test_a_missing_row_with_later_rows_renumbered_is_found() -> None:
    """The number is part of the hash."""
    chain = a_chain(9)
    moved = [replace(row, number=row.number - 1) for row in chain[5:]]
    assert problems([*chain[:4], *moved])[0].number == 5


def test_an_inserted_row_is_found() -> None:
    """With later rows renumbered, with a right hash and without one."""
    chain = a_chain(9)
    later = [replace(row, number=row.number + 1) for row in chain[4:]]
    [right] = linked([a_row(5, "other")], chain[3].head)
    assert "row 5 was inserted" in problems([*chain[:4], right, *later])[0].what
    found = problems([*chain[:4], a_row(5, "other"), *later])
    assert [number for number, _ in found[:2]] == [5, 5]
    assert "row 5 was inserted" in found[1].what


def test_a_repeated_row_is_found() -> None:
    """In a file two rows may have the same number."""
    chain = a_chain(9)
    [(number, what)] = problems([*chain[:6], chain[4], *chain[6:]])
    assert (number, what) == (5, "row 5 comes behind row 6: it was inserted or moved")


def test_exchanged_rows_are_found() -> None:
    """With their numbers exchanged too, as an UPDATE can do."""
    chain = a_chain(9)
    chain[4], chain[5] = replace(chain[5], number=5), replace(chain[4], number=6)
    assert problems(chain)[0].number == 5


def test_missing_rows_at_the_end_are_found_with_a_head() -> None:
    """Without one, the rest is a whole chain."""
    chain = a_chain(9)
    assert problems(chain[:6]) == []
    [(number, what)] = problems(chain[:6], chain[8].head)
    assert (number, what) == (7, "rows 7 to 9 are missing at the end: row 9 was there before")
    assert problems(chain[:6], newest=chain[8].head)[0].number == 7


def test_a_chain_that_was_written_anew_is_found_with_a_head() -> None:
    """It is whole, but another one."""
    chain = a_chain(9)
    anew = linked([replace(row, actor="other") for row in chain])
    assert problems(anew) == []
    [(number, what)] = problems(anew, chain[6].head)
    assert number == 7
    assert "is another one than before" in what


def test_a_chain_goes_on_behind_a_known_row() -> None:
    """An export of later rows."""
    chain = a_chain(9)
    for after, expected in ((chain[3].head, []), (Head(4, bytes(32)), [5])):
        check = ChainCheck((), after)
        for row in chain[4:]:
            check.add(row)
        assert [number for number, _ in check.end()] == expected


def test_a_rotated_file_may_begin_anywhere() -> None:
    """Its first row is taken as it is."""
    check = ChainCheck((), None)
    for row in a_chain(9)[4:]:
        check.add(row)
    assert check.end() == []
    assert check.head.number == 9


def test_a_hostile_file_has_a_limited_number_of_problems() -> None:
    """Each of its rows is wrong."""
    assert len(problems([a_row(number) for number in range(1, 1000)])) == MOST_PROBLEMS


def test_a_line_that_is_no_row_is_named() -> None:
    """An export that was cut in the middle of a line."""
    lines = [row.to_json().encode() for row in a_chain(3)]
    with pytest.raises(ValueError, match="line 3 is no row of an audit log"):
        list(rows_of_lines([*lines[:2], lines[2][:40]]))
