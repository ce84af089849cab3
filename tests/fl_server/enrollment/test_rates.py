"""Limits of requests at `enroll_listen`: for each address, for all, and for addresses that guess."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from fl_common.rate_limits import network_of
from fl_server.enrollment.calls import HOLD_S, MOST_ADDRESSES, EnrollmentRates
from fl_server.errors import TooMany
from fl_server.settings.sections import EnrollmentConfig
from protos.fl.v1.errors_pb2 import RetryLater

HERE, THERE = "192.0.2.7:5000", "192.0.2.8:5000"


def rates(**settings: Any) -> EnrollmentRates:
    """Limits with these settings: ten requests a second, and five for an address, unless given."""
    values = {"requests_per_s": 10.0, "address_requests_per_s": 5.0, "address_failures_per_min": 6.0, **settings}
    return EnrollmentRates(EnrollmentConfig.model_validate({"ca_cert": "c", "ca_key": "k", **values}))


def wait_of(error: TooMany) -> float:
    """The time to wait, as the device gets it."""
    assert isinstance(error.detail, RetryLater)
    return error.detail.wait.ToTimedelta().total_seconds()


def test_requests_of_a_second_come_at_once_and_others_wait() -> None:
    """Each further one a fifth of a second longer, up to ten seconds; then a refusal with the time to wait."""
    limits = rates()
    waits = [limits.wait(HERE, 0.0) for _ in range(55)]
    assert waits[:5] == [0.0] * 5
    assert waits[5:] == pytest.approx([0.2 * number for number in range(1, 51)])
    with pytest.raises(TooMany, match="too many requests for certificates from this address") as refused:
        limits.wait(HERE, 0.0)
    assert wait_of(refused.value) == pytest.approx(HOLD_S + 0.2)
    assert limits.wait(HERE, 0.5) <= HOLD_S


def test_one_address_does_not_use_up_the_limit_of_all() -> None:
    """Refused requests do not count; another address is let in at once after a while."""
    limits = rates(requests_per_s=50.0)
    for _ in range(500):
        with suppress(TooMany):
            limits.wait(HERE, 0.0)
    assert limits.wait(THERE, 1.2) == 0.0


def test_all_addresses_share_a_limit() -> None:
    """A refusal names it."""
    limits = rates()
    for number in range(110):
        limits.wait(f"10.0.0.{number}:1", 0.0)
    with pytest.raises(TooMany, match="for certificates in all"):
        limits.wait("10.0.1.1:1", 0.0)


def test_an_address_that_guesses_is_refused_unread() -> None:
    """After its failures, until time has passed; other addresses are not affected."""
    limits = rates()
    for second in range(7):
        limits.wait(HERE, float(second))
        limits.failed(HERE, float(second))
    with pytest.raises(TooMany, match="too many refused requests for certificates from this address") as refused:
        limits.wait("192.0.2.7:6000", 6.0)
    assert 0 < wait_of(refused.value) <= 10
    assert limits.wait(THERE, 6.0) == 0.0
    assert limits.wait(HERE, 6.0 + wait_of(refused.value) + 0.1) == 0.0


def test_a_success_is_no_failure() -> None:
    """A site behind one address may enroll as many devices as it likes."""
    limits = rates()
    for second in range(600):
        assert limits.wait(HERE, float(second)) == 0.0


def test_few_addresses_are_remembered() -> None:
    """Memory does not grow with the addresses that call."""
    limits = rates(requests_per_s=1e9)
    for number in range(MOST_ADDRESSES + 500):
        limits.wait(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1", 0.0)
    assert len(limits._requests) == len(limits._failures) == MOST_ADDRESSES


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7:5000", "192.0.2.7"),
        ("[2001:db8:1:2:3:4:5:6]:5000", "2001:db8:1:2::/64"),
        ("[::ffff:192.0.2.7]:5000", "192.0.2.7"),
        ("[fe80::1%eth0]:5000", "fe80::/64"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_an_address_counts_as_its_network(address: str, network: str) -> None:
    """A holder of IPv6 addresses has 2**64 of them."""
    assert network_of(address) == network
