"""The addresses that the coordinator gives devices in printed commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_server.enrollment.calls import dialed
from fl_server.settings.config import ServerConfig

NAMES = ["localhost", "*.example.org", "fl.example.org", "10.0.0.5", "127.0.0.1"]
"""The hosts of the certificate."""
ANY = "0.0.0.0"  # noqa: S104 - nothing is bound


@pytest.mark.parametrize(
    ("settings", "listen", "names", "expected"),
    [
        ({}, "127.0.0.1", NAMES, ("127.0.0.1:17070", "127.0.0.1:17074")),
        ({}, ANY, NAMES, ("fl.example.org:17070", "fl.example.org:17074")),
        ({}, "10.0.0.5", NAMES, ("10.0.0.5:17070", "10.0.0.5:17074")),
        ({}, "10.0.0.6", NAMES, ("fl.example.org:17070", "fl.example.org:17074")),
        ({}, ANY, ["localhost"], (":17070", ":17074")),
        ({}, "[::]", ["2001:db8::7"], ("[2001:db8::7]:17070", "[2001:db8::7]:17074")),
        ({"enroll_address": "gw.example:7074"}, ANY, NAMES, ("gw.example:17070", "gw.example:7074")),
        ({"client_address": "gw.example:443"}, ANY, NAMES, ("gw.example:443", "gw.example:17074")),
    ],
)  # fmt: skip
def test_the_addresses_are_those_that_work(
    settings: dict[str, Any], listen: str, names: list[str], expected: tuple[str, str], tmp_path: Path
) -> None:
    """The settings' own, else the open port with a host that the certificate has; never a wildcard."""
    config = ServerConfig.model_validate({"state_dir": tmp_path, "insecure": True, **settings})
    bound = {"listen": f"{listen}:17070", "enroll_listen": f"{listen}:17074"}
    assert dialed(config, bound, names) == expected
