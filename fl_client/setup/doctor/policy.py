"""Checks the site's policy file, and whether the settings fit it."""

from __future__ import annotations

from collections.abc import Iterator

from fl_client.errors import ConfigError
from fl_client.policy.config import Policy, read_policy
from fl_client.policy.trust import trusted_certificates
from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.findings import Finding, fail, ok, warn


def check(config: ClientConfig) -> Iterator[Finding]:
    """Read the file, and compare it with task and certificates. No finding without a policy."""
    if config.policy is None:
        return
    try:
        policy = read_policy(config.policy)
    except ConfigError as error:
        yield fail("policy", str(error).removeprefix("policy: "), "the daemon does not start without a valid file")
        return
    rules = ", ".join(policy.model_dump(exclude_defaults=True)) or "none"
    yield ok("policy", f"{config.policy} is valid; rules: {rules}")
    allowed = policy.tasks.allow
    if allowed is not None and config.task.name not in allowed:
        message = f"expected the task of the settings in tasks.allow, got {config.task.name!r}, which is not"
        yield fail("policy", message, "the device would refuse all work: allow the task, or set another one")
    yield from _coordinators(config, policy)
    if policy.privacy.require or policy.privacy.max_epsilon is not None:
        yield warn("policy", "privacy refuses all training: no run can state its privacy yet", "remove [privacy]")


def _coordinators(config: ClientConfig, policy: Policy) -> Iterator[Finding]:
    rules = policy.coordinators
    if rules.ca_sha256 is None:
        if rules.ids is not None:
            message = "coordinators.ids alone: the id is known only after the registration has been sent"
            yield warn("policy", message, "add coordinators.ca_sha256: it is checked before anything is sent")
        return
    if config.tls is None:
        yield fail("policy", "expected [tls] for coordinators.ca_sha256, got plain text", "add [tls] to the settings")
        return
    try:
        bundle = config.tls.ca.read_bytes()
        trusted = trusted_certificates(bundle, rules.ca_sha256)
    except (OSError, ValueError):
        return  # reported by the check of certificates
    if not trusted:
        message = f"expected a certificate of coordinators.ca_sha256 in {config.tls.ca}, got others"
        yield fail("policy", message, "compare: openssl x509 -in ca.crt -noout -fingerprint -sha256")
