"""What goes wrong in a secure aggregation.

SecureAggregationError
  PlanError       there are too few clients for the settings
  BadSignature    a signature or a certificate proves nothing
  Refused         a client does not answer
  BadMessage      a client's message cannot be used
  TooFew          a stage has too few answers: the attempt cannot go on
"""

from __future__ import annotations

from typing import Literal

Reason = Literal["place", "cohort", "floor", "trust", "signature", "conflict", "restored", "work", "quorum"]
"""Why a client refuses.

place: the round is over, or the stage has not begun. cohort: it has released a masked update in this round already.
floor: too few clients. trust: a certificate is not trusted. signature: a key or a signature is wrong. conflict: it
answered another message of this stage. restored: its state was restored from a copy. work: it has released an update of
the same work in another round. quorum: too few have signed the survivor list.
"""


class SecureAggregationError(Exception):
    """The root of these errors."""


class PlanError(SecureAggregationError):
    """There are too few clients for the settings."""


class BadSignature(SecureAggregationError):
    """A signature or a certificate does not prove that a message is of this client."""


class Refused(SecureAggregationError):
    """The client does not answer, because it would reveal more than the sum. Nothing has changed."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


class BadMessage(SecureAggregationError):
    """A client's message is malformed, has a wrong signature, or differs from its first one of this stage."""

    def __init__(self, client: str, text: str) -> None:
        super().__init__(f"{client}: {text}")
        self.client = client


class TooFew(SecureAggregationError):
    """A stage ended with too few answers. The attempt cannot go on."""

    def __init__(self, stage: str, got: int, needed: int) -> None:
        super().__init__(f"expected the {stage} of at least {needed} clients, got {got}")
        self.stage, self.got, self.needed = stage, got, needed
