"""Texts of policy files for the small devices of tests."""

from __future__ import annotations

_NO_FLOORS = ("min_batch_size", "min_examples", "min_clients")


def without_floors(text: str) -> str:
    """The policy without the default floors of [work], which devices with a few examples would not reach.

    Floors that the text has stay.
    """
    lines = "".join(f"{name} = 1\n" for name in _NO_FLOORS if name not in text)
    if "[work]\n" in text:
        return text.replace("[work]\n", f"[work]\n{lines}", 1)
    return f"{text}\n[work]\n{lines}"
