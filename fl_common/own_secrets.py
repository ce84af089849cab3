"""Random secrets with a mark by which their maker recognizes them: a made-up text is told from a secret without a list.

    secret = 43 characters of 32 random bytes + 22 characters of HMAC-SHA-256(key, the former), cut to 16 bytes

The mark opens nothing by itself: what a secret is for, and whether it is still good, is kept with its hash. It only
makes it cheap to say that a text was never given out. So limits for guesses never hold up the holder of a secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

_SECRET_BYTES, _SECRET_CHARS, _MARK_BYTES = 32, 43, 16


def new_key() -> bytes:
    """A key for marks."""
    return secrets.token_bytes(32)


def new_secret(key: bytes) -> str:
    """A random secret with its mark."""
    text = secrets.token_urlsafe(_SECRET_BYTES)
    return text + _mark(key, text)


def is_own(key: bytes, text: str) -> bool:
    """Whether the text is a secret that was made with this key."""
    secret, mark = text[:_SECRET_CHARS], text[_SECRET_CHARS:]
    return text.isascii() and hmac.compare_digest(mark, _mark(key, secret))


def _mark(key: bytes, text: str) -> str:
    digest = hmac.new(key, text.encode(), hashlib.sha256).digest()[:_MARK_BYTES]
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
