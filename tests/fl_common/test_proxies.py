"""Which proxy of the environment a connection has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_common.proxies import ProxyRefused, channel_options, connect, proxy_for
from tests.processes.http_proxy import http_proxy

PROXY = {"http_proxy": "http://proxy.example:3128"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_loopback_has_no_proxy(host: str) -> None:
    """No variable sends a connection to this machine through a proxy."""
    assert proxy_for(f"{host}:7070", environ={**PROXY, "grpc_proxy": "http://other.example"}) is None
    assert dict(channel_options(None)) == {"grpc.enable_http_proxy": 0}


@pytest.mark.parametrize(
    ("address", "no_proxy"),
    [
        ("fl.example.org:7070", "*"),
        ("fl.example.org:7070", "other, FL.example.org"),
        ("fl.example.org:7070", ".example.org"),
        ("fl.example.org:7070", "*.example.org"),
        ("fl.example.org:7070", "example.org"),
        ("10.1.2.3:7070", "10.0.0.0/8"),
        ("10.1.2.3:7070", "10.1.2.3"),
        ("[2001:db8::1]:7070", "2001:db8::/32"),
    ],
)
def test_no_proxy_is_honoured(address: str, no_proxy: str) -> None:
    """An asterisk, a host, a domain or a network in no_proxy makes a connection direct."""
    assert proxy_for(address, environ={**PROXY, "no_proxy": no_proxy}) is None
    assert proxy_for(address, environ={**PROXY, "no_grpc_proxy": no_proxy, "no_proxy": "x"}) is None


@pytest.mark.parametrize("no_proxy", ["", "ample.org", "10.0.0.0/8", "fl.example.org.", ","])
def test_other_hosts_have_the_proxy(no_proxy: str) -> None:
    """The first variable of gRPC's order counts, a missing scheme is http, and the password is in no text."""
    environ = {**PROXY, "https_proxy": "ann:s3cret@second.example", "no_proxy": no_proxy}
    proxy = proxy_for("fl.example.org:7070", environ=environ)
    assert proxy is not None
    assert (proxy.variable, proxy.address, proxy.url) == (
        "https_proxy", "second.example:80", "http://ann:s3cret@second.example:80",
    )  # fmt: skip
    assert "s3cret" not in f"{proxy} {proxy!r} {proxy.explained('x', 'y', 'z')}"
    assert proxy_for("fl.example.org:7070", use=False, environ=environ) is None


@pytest.mark.parametrize("text", ["socks5://p.example:1080", "https://p.example", "http://p.example:x", "/"])
def test_what_grpc_cannot_use_is_no_proxy(text: str) -> None:
    """A proxy of another scheme, or without a host or a port, is ignored as gRPC ignores it."""
    assert proxy_for("fl.example.org:7070", environ={"http_proxy": text}) is None


def test_a_refusal_names_the_proxy(tmp_path: Path) -> None:
    """A socket through a proxy that answers 403 fails with the proxy, its variable and the status."""
    with http_proxy(tmp_path, status=403) as refusing:
        proxy = proxy_for("fl.example.org:7070", environ={"http_proxy": refusing.address})
        with pytest.raises(ProxyRefused, match=rf"http://{refusing.address} of the variable http_proxy .* status 403"):
            connect("fl.example.org:7070", proxy, 5)
        assert refusing.asked == ["fl.example.org:7070"]
