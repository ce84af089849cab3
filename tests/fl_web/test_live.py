"""Messages of an event stream."""

from __future__ import annotations

import pytest

from fl_web.live import message


def test_a_message_has_one_line_of_data() -> None:
    """A line break in a text cannot end the message: JSON writes it as two characters."""
    text = message("parts", {"head": "<p>\n\nevent: evil\n\n</p>"}, 7).decode()
    assert text.startswith("id: 7\nevent: parts\ndata: {")
    assert text.endswith("}\n\n")
    assert text.count("\n") == 4


def test_a_message_without_a_number_keeps_the_browsers() -> None:
    """Only entries of the history move the position from which a browser continues."""
    assert message("link", {"up": True}) == b'event: link\ndata: {"up":true}\n\n'


def test_values_that_json_lacks_are_refused() -> None:
    """A browser could not read them."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        message("curves", float("nan"))
