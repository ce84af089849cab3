"""The description of a release, and its signature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_common.released import (
    MOST_BYTES,
    PURPOSE,
    WEIGHTS,
    Description,
    check_signature,
    digest_text,
    parse_description,
)
from fl_common.signatures import WrongSignature, make_key

DIGEST = "ab" * 32


def description(**changes: Any) -> dict[str, Any]:
    """The values of a description with two files."""
    files = [{"name": "a.json", "size": 3, "digest": DIGEST}, {"name": WEIGHTS, "size": 7, "digest": DIGEST}]
    values = {
        "model": "digits", "version": 2, "run": "digits-1", "round": 4, "task": "digits", "form": "adapter",
        "labels": {"site": "north"}, "files": files, "size": 10, "digest": DIGEST,
    }  # fmt: skip
    return {**values, **changes}


def test_a_description_comes_back_from_its_bytes() -> None:
    """And its files lie one after the other."""
    made = Description.model_validate(description())
    assert parse_description(made.to_bytes()) == made
    assert made.span(WEIGHTS) == (3, 7)
    assert made.fits({"site": "north", "kind": "camera"})
    assert not made.fits({"site": "south"})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "../etc"}, "model"),
        ({"version": 0}, "version"),
        ({"form": "pickle"}, "form"),
        ({"digest": "x"}, "digest"),
        ({"size": 11}, "10, the sum of the files"),
        ({"files": []}, "files"),
        ({"files": [{"name": "a.json", "size": 10, "digest": DIGEST}]}, WEIGHTS),
        ({"files": [{"name": WEIGHTS, "size": 5, "digest": DIGEST}] * 2}, "different names"),
        ({"files": [{"name": "../x", "size": 10, "digest": DIGEST}]}, "name"),
        ({"more": 1}, "more"),
    ],
)
def test_another_description_is_refused_with_what_is_wrong(changes: dict[str, Any], problem: str) -> None:
    """Names become file names on devices, so none leads to another folder."""
    with pytest.raises(ValueError, match="expected") as caught:
        parse_description(json.dumps(description(**changes)).encode())
    assert problem in str(caught.value)


def test_bytes_that_are_no_description_are_refused() -> None:
    """Too many, or no JSON."""
    for data in (b"x" * (MOST_BYTES + 1), b"{", b"[]", b"\xff"):
        with pytest.raises(ValueError, match="expected"):
            parse_description(data)


def test_only_a_trusted_key_signs(tmp_path: Path) -> None:
    """Another key, another content and another purpose are refused, and the message names the trusted keys."""
    ours, theirs = make_key(tmp_path / "ours.pem"), make_key(tmp_path / "theirs.pem")
    data = Description.model_validate(description()).to_bytes()
    signature = ours.sign(PURPOSE, digest_text(data))
    assert check_signature([theirs.signer, ours.signer], data, signature) == ours.signer
    wrong = [
        ([theirs.signer], data, signature),
        ([ours.signer], data + b" ", signature),
        ([ours.signer], data, ours.sign("package", digest_text(data))),
        ([ours.signer], data, signature[:-1]),
        ([], data, signature),
    ]
    for signers, content, by in wrong:
        with pytest.raises(WrongSignature, match=r"trusted keys \((none|ed25519)"):
            check_signature(signers, content, by)
