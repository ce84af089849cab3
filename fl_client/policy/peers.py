"""Whose keys a device takes for those of other clients in secure aggregation."""

from __future__ import annotations

from fl_client.policy.config import SecureAggregationRules
from fl_common.secure_aggregation.signatures import Trust


def trust_of_clients(rules: SecureAggregationRules, bundle: bytes | None) -> Trust | None:
    """The trust in the policy's pins, its authority, or the authorities of the coordinator's certificate; None: none.

    bundle: these authorities in PEM, which the coordinator may hold itself. Raises OSError, ValueError for a file that
    has no certificates.
    """
    if rules.peers:
        return Trust.of_pins(rules.peers)
    if rules.authority is not None:
        return Trust.of_authorities(rules.authority.read_bytes(), "outside")
    return None if bundle is None else Trust.of_authorities(bundle, "coordinator")
