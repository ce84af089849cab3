"""Ids of clients and runs."""

from __future__ import annotations

import pytest

from fl_common.names import check_id


@pytest.mark.parametrize("value", ["edge-3", "a", "A.b_c-9", "_", "7", "x" * 64])
def test_good_ids_pass(value: str) -> None:
    """A valid id is returned unchanged."""
    assert check_id("client id", value) == value


@pytest.mark.parametrize("value", ["", "x" * 65, ".", "..", ".hidden", "-rf", "a/b", "a b", "a\n", "ä", "a:b", "\x00"])
def test_bad_ids_are_refused_with_a_message(value: str) -> None:
    """Refused is an id that could leave a directory, hide a file, be an option or break a log line."""
    with pytest.raises(ValueError, match="client id: expected 1 to 64 of"):
        check_id("client id", value)
