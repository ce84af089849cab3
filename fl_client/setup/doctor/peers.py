"""Who signs the other clients' keys in secure aggregation, and so what a coordinator that lies could learn.

A policy may pin the keys of the other clients, or name an authority of theirs. Without either, the authorities of the
coordinator's certificate are taken, which it may hold itself: then it can invent clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cryptography import x509

from fl_client.errors import ConfigError
from fl_client.policy.config import Policy, read_policy
from fl_client.policy.peers import trust_of_clients
from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.findings import Finding, fail, ok, warn
from fl_common.secure_aggregation.signatures import Trust
from fl_common.units import counted

CHECK = "peers"
_OUTSIDE = "name an authority that the coordinator does not hold in secure_aggregation.authority of the policy, or the"
_FIX = f"{_OUTSIDE} other clients' keys in [secure_aggregation.peers]"


def check_peers(config: ClientConfig) -> Iterator[Finding]:
    """What holds for this device. No finding without certificates, unless the policy requires secure aggregation."""
    try:
        policy = Policy() if config.policy is None else read_policy(config.policy)
    except ConfigError:
        return  # reported by the check of the policy
    rules = policy.secure_aggregation
    if config.tls is None:
        if rules.require:
            message = "expected [tls] for secure_aggregation.require, got plain text: certificates sign the keys"
            yield fail(CHECK, message, "add [tls] to the settings")
        return
    try:
        trust = trust_of_clients(rules, config.tls.ca.read_bytes())
    except (OSError, ValueError) as error:
        if rules.authority is not None:
            yield fail(CHECK, f"expected a certificate in PEM in {rules.authority}, got {error}", _FIX)
        return  # without an authority of the policy it is that of the check of certificates
    if trust is not None:
        yield _finding(config, trust, required=rules.require, authority=rules.authority)


def _finding(config: ClientConfig, trust: Trust, *, required: bool, authority: Path | None) -> Finding:
    if trust.holder == "pinned":
        return ok(CHECK, f"keys of {counted(len(trust.pins), 'client')} in the policy. {trust.statement}")
    named = ", ".join(sorted(authority.subject.rfc4514_string() for authority in trust.authorities))
    if trust.holder == "outside":
        if config.tls is not None and config.tls.renew and _signed_own(config, trust):
            message = (
                f"expected an authority outside of the coordinator in {authority}, got {named}, which signs what this"
                " device renews at the coordinator: it could invent clients"
            )
            return warn(CHECK, message, _FIX)
        return ok(CHECK, f"signed by {named}, of the policy. {trust.statement}")
    message = f"signed by {named}, of tls.ca. {trust.statement}"
    return warn(CHECK, message, _FIX) if required else ok(CHECK, message)


def _signed_own(config: ClientConfig, trust: Trust) -> bool:
    """Whether one of the authorities signed this device's own certificate."""
    if config.tls is None:
        return False
    try:
        own = x509.load_pem_x509_certificate(config.tls.cert.read_bytes())
    except (OSError, ValueError):
        return False  # reported by the check of certificates
    return any(own.issuer == certificate.subject for certificate in trust.authorities)
