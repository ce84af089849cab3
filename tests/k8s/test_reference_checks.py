"""The checks find references to missing objects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s import reference_checks as checks
from tests.k8s.breaking import (
    CLIENT,
    COMMON,
    CONTAINER,
    GONE,
    POD,
    SERVER,
    SETTINGS,
    assert_sees,
    broken,
    cases,
    of_module,
    swap,
)
from tests.k8s.manifests import EVERYTHING, build, needs_kubectl

pytestmark = needs_kubectl

LEVEL = "pod-security.kubernetes.io/enforce"
BAD = [
    (checks.namespaces_are_guarded, "Service/fl-server", "metadata namespace", "default", "its namespace 'default'"),
    (checks.namespaces_are_guarded, "Service/fl-server", "metadata namespace", GONE, "its namespace ''"),
    (
        checks.namespaces_are_guarded, "Namespace/impetus", f"metadata labels {LEVEL}", GONE,
        "no level of Pod Security",
    ),
    (
        checks.volumes_are_there, SERVER, f"{CONTAINER} volumeMounts =settings name", "setting",
        "there is no volume setting",
    ),
    (checks.volumes_are_there, SERVER, f"{CONTAINER} volumeMounts =tls", GONE, "no container mounts the volume tls"),
    (checks.volumes_are_there, SERVER, "spec volumeClaimTemplates", [], "there is no volume state"),
    (
        checks.references_are_there, SERVER, f"{POD} volumes =settings configMap name", "fl-server",
        "there is no ConfigMap fl-server",
    ),
    (checks.references_are_there, CLIENT, f"{POD} serviceAccountName", "fl", "there is no ServiceAccount fl"),
    (
        checks.references_are_there, "Certificate/fl-server", "spec issuerRef kind", "ClusterIssuer",
        "there is no ClusterIssuer impetus-ca",
    ),
    (
        checks.files_are_there, SETTINGS, "data server.toml", swap("tls/tls.crt", "tls/server.crt"),
        "/etc/impetus/tls/server.crt is not mounted",
    ),
    (
        checks.files_are_there, SERVER, f"{CONTAINER} args 1", "/etc/impetus.toml",
        "/etc/impetus.toml is not mounted",
    ),
    (
        checks.files_are_there, COMMON, "data client.toml", swap("impetus/tls/current/tls.crt", "tls.crt"),
        "/var/lib/tls.crt is not mounted",
    ),
    (
        checks.files_are_there, CLIENT, f"{POD} volumes =enrollment secret items 0 path", "tokens",
        "/etc/impetus/enrollment/token is not mounted",
    ),
    (
        checks.files_are_there, CLIENT, f"{POD} initContainers 0 args 7", "gpu-0",
        "no init container gets a certificate into /var/lib/impetus",
    ),
    (
        checks.files_are_there, SETTINGS, "data enrollment.toml", swap("authority/tls.key", "authority/ca.key"),
        "/etc/impetus/authority/ca.key is not mounted",
    ),
    (
        checks.keys_are_not_shared, CLIENT, f"{POD} volumes =enrollment secret items 1 key", "tls.key",
        "each pod can read tls.key of the Secret fl-client-enrollment",
    ),
    (
        checks.keys_are_not_shared, CLIENT, f"{CONTAINER} volumeMounts =tmp name", "enrollment",
        "the container fl-client can read the token",
    ),
    (
        checks.files_are_there, SETTINGS, "data server.toml", swap('"/var/lib/impetus"', '"/tmp"'),
        "state_dir /tmp does not outlive the pod",
    ),
    (
        checks.certificates_name_roles, "Certificate/fl-server", "spec uris 0", "spiffe://impetus/fl-server",
        "expected one URI fl://ROLE/NAME",
    ),
    (checks.certificates_name_roles, "Certificate/fl-server", "spec usages 1", "client auth", "the use of"),
    (checks.certificates_name_roles, "Certificate/fl-server", "spec dnsNames", GONE, "a server without a name"),
]  # fmt: skip


@cases(BAD)
def test_a_check_finds_the_problem(check: Any, name: str, path: Any, value: Any, words: str) -> None:
    """The problem names the object."""
    assert_sees(check, broken(name, path, value), words)


def test_every_check_has_a_failing_case() -> None:
    """A check without a failing case would be useless."""
    assert {check for check, *_ in BAD} == of_module(checks)


@pytest.mark.parametrize(
    ("documented", "missing"),
    [
        ({}, "fl-server-ledger has no source of password"),
        (
            {("impetus", "fl-server-ledger"): {"password"}},
            "fl-server-ledger has no source of ca.crt, ledger.toml",
        ),
        (
            {("impetus", "fl-server-ledger"): {"password", "ca.crt", "ledger.toml"}},
            "impetus-ca has no source of tls.crt",
        ),
    ],
)
def test_an_undocumented_secret_is_found(documented: Any, missing: str) -> None:
    """It is found by name and keys. Those that cert-manager creates count as existing."""
    found = " ".join(checks.secrets_that_are_missing(build(EVERYTHING), documented))
    assert missing in found
    assert "fl-server-tls" not in found
