"""The admission of masked updates: their size, their digest, and what their header says. Their values say nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fl_server.admission.client_rules import UpdateRefused, WrongDigest
from fl_server.admission.reading import UpdateContent
from fl_server.aggregation.updates import Decoding, Source, UpdateShape
from fl_server.store.files import file_digest
from protos.codec import Entry, digest_bytes
from protos.fl.v1.training_pb2 import PayloadKind, RefusalReason, UpdateHeader


@dataclass(frozen=True, slots=True)
class MaskedGate:
    """The rules for one client's masked update. It stands in place of `AdmissionGate`."""

    size_bytes: int

    def check_header(self, header: UpdateHeader) -> None:
        """All checks that need no bytes. Raises UpdateRefused."""
        kinds = [payload.kind for payload in header.payloads]
        if kinds != [PayloadKind.PAYLOAD_KIND_MASKED] or header.payloads[0].manifest.tensors:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_LAYOUT,
                f"expected one payload of the kind MASKED without tensors, got the kinds {kinds[:8]}",
            )
        if header.size_bytes != self.size_bytes:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_SIZE, f"expected {self.size_bytes} bytes, got {header.size_bytes}"
            )
        if header.HasField("training_loss") or header.epochs or (header.num_steps, header.num_examples) != (1, 1):
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_HEADER,
                "expected 1 for the examples and the steps, and no metrics, with secure aggregation: they are summed"
                " under the masks",
            )
        try:
            digest_bytes(header.digest)
        except ValueError as error:
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_DIGEST, str(error)) from error

    def read(self, path: Path, steps: int = 0) -> UpdateContent:
        """Read a whole update on disk for `check_content`. Raises StoreError."""
        del steps
        return UpdateContent(file_digest(path), ())

    @property
    def shape_read(self) -> UpdateShape | None:
        """None: no values are read."""
        return None

    @property
    def buffers_sent(self) -> list[Entry]:
        """None are known."""
        return []

    def decoding(self, steps: int) -> Decoding:
        """No values are read."""
        raise NotImplementedError(f"a masked update of {steps} steps has no values")

    def update_in(self, source: Source, steps: int = 0) -> Source:
        """See `AdmissionGate.update_in`."""
        del steps
        return source

    def check_content(self, update: Source, digest: bytes, content: UpdateContent) -> dict[str, float]:
        """Check a whole update that was read. Its norm is 0: nobody knows it. Raises WrongDigest."""
        del update
        if content.digest != digest:
            raise WrongDigest(digest, content.digest)
        return {"masked": 0.0}

    def clip_factor(self, norm: float) -> float:
        """The factor of the update: the device has clipped it."""
        del norm
        return 1.0
