"""Limits of requests at `enroll_listen`, where callers have no name: for each address and for the whole port.

An address that only guesses is stopped by its failures, and does not reach the limit of the port. Clocks are arguments,
in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from fl_common.addresses import network_of
from fl_server.clients.rate_limits import TokenBucket
from fl_server.errors import TooMany
from fl_server.security_config import EnrollmentConfig

HOLD_S = 10.0
"""Longest wait in a call for its turn."""
MOST_ADDRESSES = 4096
"""Addresses that are remembered; of more, the one that has called least recently is dropped."""


@dataclass(slots=True)
class _Source:
    """The limits of one address."""

    requests: TokenBucket
    failures: TokenBucket


class EnrollmentRates:
    """The limits of one port. Lives on the event loop."""

    def __init__(self, config: EnrollmentConfig) -> None:
        self._config = config
        self._all = _per_second(config.requests_per_s)
        self._sources: OrderedDict[str, _Source] = OrderedDict()

    def wait(self, address: str, now: float) -> float:
        """Count a request. Returns the seconds until its turn, at most HOLD_S. Raises TooMany.

        address: host:port of the caller.
        """
        source = self._source(address)
        if left := source.failures.take(0.0, now):
            raise TooMany("too many refused requests for certificates from this address", left, routine=True)
        waits = {"from this address": source.requests.spend(1.0, now), "in all": self._all.spend(1.0, now)}
        whose = max(waits, key=lambda each: waits[each])
        if (wait := waits[whose]) > HOLD_S:
            for bucket in (source.requests, self._all):
                bucket.spend(-1.0, now)
            raise TooMany(f"too many requests for certificates {whose}", wait, routine=True)
        return wait

    def failed(self, address: str, now: float) -> None:
        """Count a refused request."""
        self._source(address).failures.spend(1.0, now)

    def _source(self, address: str) -> _Source:
        key = network_of(address)
        source = self._sources.get(key)
        if source is None:
            config = self._config
            failures = TokenBucket(max(1.0, config.address_failures_per_min), config.address_failures_per_min / 60.0)
            source = self._sources[key] = _Source(_per_second(config.address_requests_per_s), failures)
            if len(self._sources) > MOST_ADDRESSES:
                self._sources.popitem(last=False)
        self._sources.move_to_end(key)
        return source


def _per_second(rate: float) -> TokenBucket:
    """A bucket for the requests of one second, at least one."""
    return TokenBucket(max(1.0, rate), rate)
