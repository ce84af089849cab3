"""Which proxy of the environment a connection has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_common import proxies
from fl_common.proxies import ProxyRefused, channel_options, checked_proxy, choice_for, connect, proxy_for
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
    assert (proxy.source, proxy.address, proxy.url) == (
        "the variable https_proxy", "second.example:80", "http://ann:s3cret@second.example:80",
    )  # fmt: skip
    assert "s3cret" not in f"{proxy} {proxy!r} {proxy.explained('x', 'y', 'z')}"
    assert proxy_for("fl.example.org:7070", "none", environ=environ) is None


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


def test_a_name_of_the_hosts_file_is_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a loopback address in the hosts file has no proxy; one with another address, or in a comment, has."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 Robot robot.site # fl.example.org\n::1 six\n10.0.0.7 far\n")
    monkeypatch.setattr(proxies, "HOSTS", hosts)
    direct = [
        host
        for host in ("robot", "robot.site", "six", "far", "fl.example.org")
        if proxy_for(f"{host}:7070", environ=PROXY) is None
    ]
    assert direct == ["robot", "robot.site", "six"]
    assert proxy_for("robot:7070", "http://proxy.example:3128", {}) is None


@pytest.mark.parametrize(
    ("setting", "environ", "why"),
    [
        ("environment", {}, "none of the variables grpc_proxy, https_proxy, http_proxy is set"),
        ("environment", PROXY, "the proxy http://proxy.example:3128 of the variable http_proxy"),
        ("environment", {**PROXY, "no_proxy": "example.org"}, "the variable no_proxy has fl.example.org"),
        ("environment", {"https_proxy": "socks5://p:1"}, "the variable https_proxy is not used: it is no URL"),
        ("none", PROXY, 'the setting proxy is "none"'),
        ("http://ann:s3cret@own", {"no_proxy": "*"}, "the proxy http://own:80 of the setting proxy"),
    ],
)
def test_a_choice_has_its_reason(setting: str, environ: dict[str, str], why: str) -> None:
    """The setting is stronger than the environment, and the reason names what decided."""
    choice = choice_for("fl.example.org:7070", setting, environ)
    assert choice.why.startswith(why)
    assert (choice.proxy is None) == (not why.startswith("the proxy"))
    assert choice.unusable == ("not used" in why)


@pytest.mark.parametrize("text", ["", "off", "socks5://p.example:1080", "http://ann:s3cret@p.example:x"])
def test_another_setting_is_refused(text: str) -> None:
    """The error states the three forms, and not the text, which may have a password."""
    with pytest.raises(ValueError, match='"none", "environment" or the URL') as refused:
        checked_proxy(text)
    assert "s3cret" not in str(refused.value)
