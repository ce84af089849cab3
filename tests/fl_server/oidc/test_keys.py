"""The provider's keys: from a file or an address, read again when it is due, and not more often."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fl_common.settings import SettingsError
from fl_server import oidc
from fl_server.errors import NotNow
from fl_server.oidc import LEAST_WAIT_S, MOST_AGE_S, SigningKeys, usable_keys
from fl_server.settings.sections import OidcConfig
from tests.fl_server.harness import until
from tests.processes.certificates import Pki
from tests.processes.http_proxy import http_proxy
from tests.processes.identity_provider import AUDIENCE, ISSUER, Key, jwks, serving_jwks

A, B = Key("a"), Key("b")
ALL = ["RS256", "ES256", "EdDSA"]


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def config(**settings: Any) -> OidcConfig:
    """Settings with this source of keys."""
    return OidcConfig(**{"issuer": ISSUER, "audience": AUDIENCE, "roles": {"x": "viewer"}, **settings})


async def test_a_new_key_is_found_and_an_old_one_is_gone(tmp_path: Path) -> None:
    """The provider changes its key: the first token with the new one reads the file again."""
    file, clock = tmp_path / "keys", Clock()
    file.write_bytes(jwks(A.public()))
    keys = SigningKeys(config(jwks_file=file), clock)
    await keys.start()
    before = await keys.current()
    assert await keys.find("a") is not None
    file.write_bytes(jwks(B.public()))
    clock.now = LEAST_WAIT_S
    assert await keys.find("b") is not None
    assert await keys.find("a") is None
    assert await keys.current() != before  # identities that the old key verified are forgotten


async def test_a_removed_key_is_gone_after_a_while(tmp_path: Path) -> None:
    """Without any token with a new key."""
    file, clock = tmp_path / "keys", Clock()
    file.write_bytes(jwks(A.public(), B.public()))
    keys = SigningKeys(config(jwks_file=file, refresh_s=100), clock)
    await keys.start()
    before = await keys.current()
    file.write_bytes(jwks(B.public()))
    clock.now = 99
    assert await keys.current() == before
    clock.now = 100
    await keys.current()
    await until(lambda: keys.version != before, "they are read again")
    clock.now = 101
    assert await keys.find("a") is None


async def test_unknown_keys_read_the_address_at_most_every_ten_seconds() -> None:
    """A thousand tokens with invented keys, many at once, are one request to the provider."""
    clock = Clock()
    with serving_jwks(jwks(A.public())) as served:
        keys = SigningKeys(config(jwks_url=served.url), clock)
        await keys.start()
        clock.now = LEAST_WAIT_S
        found = await asyncio.gather(*(keys.find(f"unknown-{number}") for number in range(1000)))
        assert not any(found)
        assert served.reads == 2
        clock.now += LEAST_WAIT_S - 1
        await keys.find("another")
        assert served.reads == 2
        clock.now += LEAST_WAIT_S
        await keys.find("unknown")
        assert served.reads == 3


async def test_keys_stay_while_the_provider_is_down_but_not_for_ever(tmp_path: Path) -> None:
    """They serve for a day, with a warning; then calls are refused until they can be read."""
    file, clock = tmp_path / "keys", Clock()
    file.write_bytes(jwks(A.public()))
    keys = SigningKeys(config(jwks_file=file), clock)
    await keys.start()
    file.write_bytes(b"Service Unavailable")
    with capture_logs() as logs:
        clock.now = MOST_AGE_S - 1
        await keys.current()
        await until(lambda: bool(logs), "the failure is logged")
        assert await keys.find("a") is not None
        clock.now = MOST_AGE_S + 20
        with pytest.raises(NotNow, match="the signing keys of the identity provider cannot be read"):
            await keys.current()
        file.write_bytes(jwks(A.public()))
        clock.now += LEAST_WAIT_S
        await keys.current()
    assert logs[0]["event"] == "signing_keys_not_read"
    assert "expected a JWKS" in logs[0]["reason"]


async def test_a_file_without_keys_ends_the_start(tmp_path: Path) -> None:
    """A setting is wrong; an address may only be down."""
    with capture_logs(), pytest.raises(SettingsError, match="oidc.jwks_file: expected signing keys in"):
        await SigningKeys(config(jwks_file=tmp_path / "none")).start()
    down = SigningKeys(config(jwks_url="http://127.0.0.1:1/jwks"))
    with capture_logs() as logs:
        await down.start()
        with pytest.raises(NotNow):
            await down.current()
    assert "Connection refused" in logs[0]["reason"]


async def test_keys_come_over_https_of_a_known_authority(tmp_path: Path) -> None:
    """The provider's certificate is checked: with its authority, and not without."""
    pki = Pki(tmp_path)
    files = pki.issue("server", "id")
    with serving_jwks(jwks(A.public()), (files.cert, files.key)) as served:
        keys = SigningKeys(config(jwks_url=served.url, jwks_ca=pki.ca))
        await keys.start()
        assert await keys.find("a") is not None
        with capture_logs() as logs:
            await SigningKeys(config(jwks_url=served.url)).start()
        assert "CERTIFICATE_VERIFY_FAILED" in logs[0]["reason"]


async def test_keys_of_this_machine_come_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dead proxy in the environment, keys at a loopback address are read."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving_jwks(jwks(A.public())) as served:
        keys = SigningKeys(config(jwks_url=served.url))
        await keys.start()
        assert await keys.find("a") is not None


@pytest.mark.parametrize(("changes", "asked"), [({}, True), ({"proxy": "none"}, False)])
async def test_a_failure_of_the_proxy_names_it(
    changes: dict[str, str], asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys elsewhere are asked for through the proxy, unless the setting turns it off; the log has its variable."""
    with http_proxy(tmp_path, 403) as proxy, capture_logs() as logs:
        monkeypatch.setenv("https_proxy", f"http://ann:s3cret@{proxy.address}")
        await SigningKeys(config(jwks_url="https://id.invalid/keys", **changes)).start()
        assert bool(proxy.asked) == asked
    reason = logs[0]["reason"]
    assert ("of the variable https_proxy" in reason, "403" in reason) == (asked, asked)
    assert "s3cret" not in reason


@pytest.mark.parametrize("content", ["redirect", "large"])
async def test_redirects_and_large_answers_are_refused(content: str) -> None:
    """A redirect could lead to plain text."""
    with serving_jwks(jwks(A.public())) as served, capture_logs() as logs:
        if content == "redirect":
            served.redirect = served.url
        else:
            served.content += b" " * (300 << 10)
        keys = SigningKeys(config(jwks_url=served.url))
        await keys.start()
        with pytest.raises(NotNow):
            await keys.current()
    assert {"redirect": "expected the status 200, got 302", "large": "expected at most 262144 bytes"}[content] in logs[
        0
    ]["reason"]


async def test_a_provider_that_never_answers_does_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read in a thread, and the wait has an end; the loop goes on in the meantime."""
    monkeypatch.setattr(oidc, "READ_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as logs:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        reading = asyncio.create_task(SigningKeys(config(jwks_url=url)).start())
        turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            turns += 1
        await reading
    assert turns > 5
    assert logs[0]["event"] == "signing_keys_not_read"


OTHERS = {
    "for encryption": A.public(use="enc"),
    "a shared secret": {"kty": "oct", "k": "c2VjcmV0", "kid": "a", "alg": "HS256"},
    "a shared secret without algorithm": {"kty": "oct", "k": "c2VjcmV0", "kid": "a"},
    "another algorithm than the type": A.public(alg="RS256"),
    "an algorithm of secrets": A.public(alg="HS256"),
    "unknown type": {"kty": "PQC", "kid": "a"},
    "no curve": A.public(crv=None),
    "not on the curve": A.public(x="AAAA"),
    "a private key": {**A.public(), "d": "AQAB"},
    "text": "key",
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_keys_of_a_jwks_are_left_out(case: str) -> None:
    """They do not stop the use of the others."""
    other: Any = OTHERS[case]
    assert list(usable_keys(jwks(other, B.public()), ALL)) == ["b"]
    with pytest.raises(ValueError, match="expected public keys for RS256 or ES256 or EdDSA, got 1 key, none"):
        usable_keys(jwks(other), ALL)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"keys": 1}', b"[" * 100_000, b"\xff"])
def test_other_content_is_no_jwks(raw: bytes) -> None:
    """A ValueError of one line."""
    with pytest.raises(ValueError, match="expected a JWKS"):
        usable_keys(raw, ALL)
