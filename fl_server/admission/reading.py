"""Reads a whole update on disk once, for its admission."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fl_server.admission.digest_and_norms import digest_and_norms
from fl_server.admission.encoded_norms import digest_and_norms_of_encoded
from fl_server.aggregation.encoded_update import EncodedUpdate
from fl_server.aggregation.updates import UpdateShape


class UpdateContent(NamedTuple):
    """What admission has to know of the bytes of an update."""

    digest: bytes
    """BLAKE3-256 of the file."""
    squares: Sequence[float]
    """For each tensor, by rising offset, the sum of the squares of its values; 0 for integers and bools."""
    wrong: str = ""
    """What is wrong with encoded bytes; empty if nothing is."""


def read_update(update: Path | EncodedUpdate, shape: UpdateShape) -> UpdateContent:
    """Read an update of this shape. Raises StoreError for a file that is too short."""
    if isinstance(update, EncodedUpdate):
        return UpdateContent(*digest_and_norms_of_encoded(update))
    return UpdateContent(*digest_and_norms(update, shape.entries))
