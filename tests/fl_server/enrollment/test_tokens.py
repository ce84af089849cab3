"""Tokens: long random secrets that are never shown, and specs that cannot be made."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from fl_server.enrollment.grants import MOST_TOKENS, Token, TokenSpec, new_token, parse_token, state_of
from fl_server.errors import InvalidInput, NoSuchToken, NotEnrolled
from tests.fl_server.enrollment.site import Site
from tests.fl_server.store.database.test_certificates import NOW, a_token


def test_a_secret_has_256_random_bits() -> None:
    """Each token has another secret and another id, and its text gives both back."""
    tokens = [new_token() for _ in range(50)]
    assert len({token.secret for token in tokens} | {token.id for token in tokens}) == 100
    assert {len(base64.urlsafe_b64decode(token.secret + "=")) for token in tokens} == {32}
    assert [parse_token(token.text) for token in tokens] == tokens


def test_a_secret_is_not_shown() -> None:
    """Neither the token nor its record has the secret in a repr, and the record not even its hash."""
    token = new_token()
    shown = f"{token} {token!r} {[token]} {a_token(secret_hash=token.secret_hash)!r}"
    assert token.id in shown
    assert token.secret not in shown
    assert repr(token.secret_hash) not in shown


def test_only_the_secret_opens_a_token() -> None:
    """Another secret, another record and no record do not."""
    token, other = new_token(), new_token()
    record = a_token(secret_hash=token.secret_hash)
    assert token.opens(record)
    assert not other.opens(record)
    assert not token.opens(None)
    assert not Token(token.id, "").opens(replace(record, secret_hash=bytes(32)))


@pytest.mark.parametrize("text", ["", ".", "a.b", "0" * 16 + ".", "0" * 16 + "." + "x" * 44, "0" * 5000, "é" * 60])
def test_other_text_is_no_token(text: str) -> None:
    """The message has the form of a token and not the text."""
    with pytest.raises(NotEnrolled, match="a token as `fl enroll create` prints it") as refused:
        parse_token(text)
    assert len(str(refused.value)) < 200


def test_the_state_of_a_token() -> None:
    """Revoked before used before expired."""
    cases: dict[str, dict[str, Any]] = {
        "open": {}, "used": {"uses_left": 0, "expires_at": 0.0}, "expired": {"expires_at": NOW},
        "revoked": {"revoked": True, "uses_left": 0},
    }  # fmt: skip
    assert {name: state_of(a_token(**changes), NOW) for name, changes in cases.items()} == {
        each: each for each in cases
    }


def spec(**changes: Any) -> TokenSpec:
    """A token for edge-7 with changes."""
    return TokenSpec(**{"name": "edge-7", "prefix": "", "uses": 0, "labels": {}, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": ""}, "expected a name or a name_prefix, got neither"),
        ({"prefix": "edge-"}, "got both"),
        ({"name": "../x"}, "that do not start with"),
        ({"name": "", "prefix": "-"}, "that do not start with"),
        ({"uses": 2}, "specs[1].uses: expected 1 for a token with a name"),
        ({"name": "", "prefix": "edge-", "uses": 100_001}, "at most 100,000"),
        ({"labels": {f"{number}": "x" for number in range(65)}}, "at most 64 labels"),
        ({"labels": {"site": "x" * 257}}, "at most 64 labels of at most 256"),
        ({"labels": {"site": "a\nb"}}, "printable"),
    ],
)
async def test_a_spec_that_cannot_be_made(site: Site, changes: dict[str, Any], text: str) -> None:
    """The message names the spec; of several none is made."""
    with pytest.raises(InvalidInput) as refused:
        await site.tokens.create([spec(), spec(**changes)], 0, "admin:alice")
    assert text in str(refused.value)
    assert site.ledger.store.enrollments(None, 9) == []


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan"), float("inf"), 1e9])
async def test_a_time_that_cannot_be(site: Site, ttl_s: float) -> None:
    """Negative, not a number, infinite or longer than a year."""
    with pytest.raises(InvalidInput, match="ttl_s: expected 0 to"):
        await site.tokens.create([spec()], ttl_s, "admin:alice")


@pytest.mark.parametrize("number", [0, MOST_TOKENS + 1])
async def test_a_number_of_tokens_that_cannot_be(site: Site, number: int) -> None:
    """None, or more than one call may make."""
    with pytest.raises(InvalidInput, match="specs: expected 1 to 1,000 tokens"):
        await site.tokens.create([spec()] * number, 0, "admin:alice")


async def test_the_secret_is_nowhere_in_the_ledger(site: Site) -> None:
    """Neither in the token's row nor in the history."""
    token = parse_token(await site.token("edge-7", labels={"site": "north"}))
    store = site.ledger.store
    rows = f"{[vars_of(each) for each in store.enrollments(None, 9)]} {store.history()}"
    assert token.id in rows
    assert token.secret not in rows


def vars_of(record: object) -> dict[str, Any]:
    """All fields of a record."""
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}  # type: ignore[attr-defined]  # a dataclass


async def test_an_unknown_token_cannot_be_revoked(site: Site) -> None:
    """The message has the command that lists tokens."""
    with pytest.raises(NoSuchToken, match="no enrollment token '0123'; `fl enroll list`"):
        await site.tokens.revoke("0123", "", "admin:alice")
