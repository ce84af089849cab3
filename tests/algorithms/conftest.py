"""Fixtures of the algorithm tests: those that packages of others have too."""

from __future__ import annotations

from algorithms.conformance.plugin import conditioned, federation

__all__ = ["conditioned", "federation"]
