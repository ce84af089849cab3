"""Criteria that many tests use."""

from __future__ import annotations

from fl_server.rounds.metrics import Criterion

BY_ACCURACY = Criterion("accuracy", lower_is_better=False)
