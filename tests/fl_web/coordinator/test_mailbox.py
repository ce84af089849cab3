"""Changes for one browser."""

from __future__ import annotations

from fl_web.coordinator.mailbox import Mailbox
from protos.fl.v1 import admin_pb2 as pb


def entries(*numbers: int) -> list[pb.HistoryEntry]:
    """Entries with these numbers."""
    return [pb.HistoryEntry(number=number) for number in numbers]


def test_an_entry_is_delivered_once() -> None:
    """Two sources may overlap: what was kept, and the stream."""
    mailbox = Mailbox(4)
    mailbox.put_entries(entries(3, 4, 5, 6), 6)
    mailbox.put_entries(entries(5, 6, 9), 9)
    news = mailbox.take()
    assert [entry.number for entry in news.entries] == [5, 6, 9]
    assert news.number == 9


def test_a_number_without_entries_is_news() -> None:
    """Entries that the caller may not see still move the position, and an older position does not."""
    mailbox = Mailbox(4)
    mailbox.put_entries([], 8)
    assert mailbox.take().number == 8
    mailbox.put_entries([], 7)
    assert mailbox.take().number is None


def test_a_browser_that_does_not_keep_up_must_connect_again() -> None:
    """Memory is bounded; the browser continues from the number that it has."""
    mailbox = Mailbox()
    mailbox.put_entries(entries(*range(1, 4001)), 4000)
    before = mailbox.overrun
    mailbox.put_entries(entries(*range(4001, 6001)), 6000)
    assert (before, mailbox.overrun) == (False, True)
    assert len(mailbox.take().entries) == 4000
