"""Texts of policy files for the small devices of tests."""

from __future__ import annotations

_NO_FLOORS = "min_batch_size = 1\nmin_examples = 1\nmin_clients = 1\n"


def without_floors(text: str) -> str:
    """The policy without the default floors of [work], which devices with a few examples would not reach."""
    if "[work]\n" in text:
        return text.replace("[work]\n", f"[work]\n{_NO_FLOORS}", 1)
    return f"{text}\n[work]\n{_NO_FLOORS}"
