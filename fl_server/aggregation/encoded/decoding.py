"""What is needed to decode one client's update, besides its bytes."""

from __future__ import annotations

from typing import NamedTuple

from algorithms.reference import KnownPart
from fl_server.aggregation.encoded.run_encodings import UpdateKeys


class Decoding(NamedTuple):
    """The keys of its payloads, and the part of the delta that was not sent."""

    keys: UpdateKeys
    known: KnownPart | None = None
    """None: the whole delta was sent."""
