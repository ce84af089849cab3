"""`fl enroll`, `fl certificates` and `fl clients revoke`: what they send, print and write."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.fl.v1 import admin_pb2 as pb
from tests.fl_ops.conftest import FakeAdmin, Fl

CA = "ab" * 32


def created(
    *names: str, at: tuple[str, str] = ("fl.example.org:7070", "fl.example.org:7074"), **spec: Any
) -> pb.CreateEnrollmentsResponse:
    """A response with a token for each name. at: the addresses for clients and for enrollment."""
    answer = pb.CreateEnrollmentsResponse(ca_fingerprint=CA, client_address=at[0], enroll_address=at[1])
    for number, name in enumerate(names):
        values: dict[str, Any] = {"name": name, "uses": 1, **spec}
        given = pb.EnrollmentSpec(**values)
        token = pb.EnrollmentToken(id=f"{number:016x}", spec=given, state="open", uses_left=1)
        token.expires.FromSeconds(1_800_000_000)
        answer.created.add(enrollment=token, token=f"{token.id}.secret{number}")
    return answer


def sent(admin: FakeAdmin) -> Any:
    """The last request."""
    return admin.requests[-1]


def test_a_token_is_printed_with_its_command(admin: FakeAdmin, fl: Fl) -> None:
    """The command has the address, the authority and the token; the ports are those that the daemon assumes."""
    admin.responses["CreateEnrollments"] = created("edge-7")
    done = fl("enroll", "create", "--name", "edge-7", "--ttl", "90m", "--label", "site=north")
    assert done.exit_code == 0, done.stderr
    assert sent(admin) == pb.CreateEnrollmentsRequest(
        specs=[pb.EnrollmentSpec(name="edge-7", labels={"site": "north"})], ttl_s=5400
    )
    command = f"fl-client init --server fl.example.org:7070 --ca-fingerprint {CA} --token {'0' * 16}.secret0"
    assert done.stdout.splitlines()[-1] == command
    assert done.stdout.startswith("edge-7, 1 use, valid until 2027-01-")


@pytest.mark.parametrize(
    ("at", "options"),
    [
        (("fl.example.org:443", "fl.example.org:7074"), "--server fl.example.org:443"),
        (("fl.example.org:7070", "fl.example.org:9000"), "--server fl.example.org:7070 --enroll-server fl.example.org"),
        (("a.example:1", "b.example:7074"), "--server a.example:1 --enroll-server b.example:7074"),
        (("[2001:db8::7]:8070", "[2001:db8::7]:7074"), "--server [2001:db8::7]:8070"),
        ((":17070", ":17074"), "--server 127.0.0.1:17070 --enroll-server 127.0.0.1:17074"),
    ],
)
def test_the_address_in_the_command(admin: FakeAdmin, fl: Fl, at: tuple[str, str], options: str) -> None:
    """The coordinator's answer has the ports; without a host it is the one that `fl` has reached."""
    admin.responses["CreateEnrollments"] = created("edge-7", at=at)
    assert f"fl-client init {options}" in fl("enroll", "create", "--name", "edge-7").stdout


def test_json_has_the_tokens(admin: FakeAdmin, fl: Fl) -> None:
    """And nothing else is on stdout."""
    admin.responses["CreateEnrollments"] = created("edge-7")
    values = json.loads(fl("enroll", "create", "--name", "edge-7", "--json").stdout)
    assert values["tokens"] == [{"name": "edge-7", "token": f"{'0' * 16}.secret0"}]
    assert values["ca_fingerprint"] == CA
    assert values["command"].endswith(f"--token {'0' * 16}.secret0")


def test_many_tokens_go_to_a_private_file(admin: FakeAdmin, fl: Fl, tmp_path: Path) -> None:
    """A line for each device, readable by the owner only; stdout has no token. An older file stays."""
    admin.responses["CreateEnrollments"] = created("edge-1", "edge-2")
    create = ("enroll", "create", "--prefix", "edge-", "--count", 2, "--out", "tokens.csv")
    done = fl(*create)
    assert done.exit_code == 0, done.stderr
    assert [spec.name for spec in sent(admin).specs] == ["edge-1", "edge-2"]
    path = tmp_path / "tokens.csv"
    assert path.read_text() == f"name,token\nedge-1,{0:016x}.secret0\nedge-2,{1:016x}.secret1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" not in done.stdout
    assert "--token TOKEN" in done.stdout
    again, before = fl(*create), len(admin.requests)
    assert again.exit_code == 2
    assert "tokens in it may be in use" in again.stderr
    assert len(admin.requests) == before


def test_many_tokens_are_printed_as_lines(admin: FakeAdmin, fl: Fl) -> None:
    """Without a file."""
    admin.responses["CreateEnrollments"] = created("edge-1", "edge-2")
    lines = fl("enroll", "create", "--prefix", "edge-", "--count", 2).stdout.splitlines()
    assert lines[:3] == ["name,token", f"edge-1,{0:016x}.secret0", f"edge-2,{1:016x}.secret1"]


def test_a_thousand_tokens_are_one_call(admin: FakeAdmin, fl: Fl) -> None:
    """More are several."""
    admin.responses["CreateEnrollments"] = created("edge-1")
    fl("enroll", "create", "--prefix", "edge-", "--count", 2500)
    assert [len(request.specs) for request in admin.requests if hasattr(request, "specs")] == [1000, 1000, 500]


def test_a_bootstrap_token(admin: FakeAdmin, fl: Fl) -> None:
    """One token for many devices."""
    admin.responses["CreateEnrollments"] = created("", name_prefix="gpu-", uses=50)
    done = fl("enroll", "create", "--prefix", "gpu-", "--uses", 50, "--ttl", "7d")
    assert sent(admin).specs[0] == pb.EnrollmentSpec(name_prefix="gpu-", uses=50)
    assert sent(admin).ttl_s == 604_800
    assert done.stdout.startswith("gpu-*, 50 uses, valid until")


def test_devices_of_a_csv_file(admin: FakeAdmin, fl: Fl, tmp_path: Path) -> None:
    """Names and labels; a label of the command line is for all that have none of that key."""
    (tmp_path / "devices.csv").write_text("\ufeffname,labels\nedge-1,site=north;rack=3\nedge-2\n\n")
    admin.responses["CreateEnrollments"] = created("edge-1", "edge-2")
    done = fl("enroll", "create", "--csv", "devices.csv", "--label", "site=south", "--label", "kind=gpu")
    assert done.exit_code == 0, done.stderr
    assert {spec.name: dict(spec.labels) for spec in sent(admin).specs} == {
        "edge-1": {"site": "north", "rack": "3", "kind": "gpu"},
        "edge-2": {"site": "south", "kind": "gpu"},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("edge-1,site\n", "--csv, line 1: expected KEY=VALUE, got 'site'"),
        ("name,labels\nedge-1,a=b,c\n", "in line 2 of devices.csv, got ['edge-1', 'a=b', 'c']"),
        ("edge-1\nedge-1\n", "expected at least one device in devices.csv, each once, got 2"),
        ("name,labels\n", "each once, got 0"),
    ],
)
def test_a_csv_file_that_cannot_be_used(admin: FakeAdmin, fl: Fl, tmp_path: Path, text: str, message: str) -> None:
    """The message has the line. Nothing is sent."""
    (tmp_path / "devices.csv").write_text(text)
    done = fl("enroll", "create", "--csv", "devices.csv")
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert admin.requests == []


@pytest.mark.parametrize(
    "options",
    [
        (), ("--prefix", "gpu-"), ("--name", "a", "--prefix", "b", "--count", 2), ("--name", "a", "--uses", 2),
        ("--count", 2), ("--prefix", "a", "--count", 2, "--uses", 2), ("--csv", "x", "--name", "a"),
    ],
)  # fmt: skip
def test_one_way_to_name_the_devices(admin: FakeAdmin, fl: Fl, options: tuple[object, ...]) -> None:
    """None or two are refused, with the four ways."""
    done = fl("enroll", "create", *options)
    assert (done.exit_code, admin.requests) == (2, [])
    assert "--prefix PREFIX --uses N, and --csv FILE" in done.stderr


@pytest.mark.parametrize("ttl", ["1", "h", "0h", "1.5h", "-1h", "1w", "99999999999d"])
def test_a_ttl_that_cannot_be(admin: FakeAdmin, fl: Fl, ttl: str) -> None:
    """The message has an example."""
    done = fl("enroll", "create", "--name", "edge-7", f"--ttl={ttl}")
    assert (done.exit_code, admin.requests) == (2, [])
    assert "--ttl: expected a number with s, m, h or d, such as 1h" in done.stderr


def test_tokens_are_listed_and_revoked(admin: FakeAdmin, fl: Fl) -> None:
    """By the id; a whole token by mistake is cut, so that its secret is not sent."""
    token = created("edge-7").created[0].enrollment
    admin.responses["ListEnrollments"] = pb.ListEnrollmentsResponse(enrollments=[token])
    admin.responses["RevokeEnrollment"] = pb.RevokeEnrollmentResponse(enrollment=token)
    assert token.id in fl("enroll", "list").stdout
    fl("enroll", "revoke", f"{token.id}.secret", "--reason", "lost")
    assert sent(admin) == pb.RevokeEnrollmentRequest(id=token.id, reason="lost")
    admin.fail("RevokeEnrollment", grpc.StatusCode.NOT_FOUND, "no enrollment token 'x'")
    assert fl("enroll", "revoke", "x").exit_code != 0


def test_certificates_are_listed(admin: FakeAdmin, fl: Fl) -> None:
    """With the reason of a revocation; an unknown date is a dash."""
    status = pb.CertificateStatus(serial="a1", name="edge-7", reason="stolen", key="cd" * 32)
    status.revoked.FromSeconds(1_800_000_000)
    admin.responses["ListCertificates"] = pb.ListCertificatesResponse(certificates=[status])
    shown = fl("certificates", "list", "--name", "edge-7").stdout
    assert sent(admin).name == "edge-7"
    assert all(text in shown for text in ("edge-7", "a1", "stolen", "2027-01-"))


@pytest.mark.parametrize(
    ("options", "request_"),
    [
        (("edge-7",), {"name": "edge-7"}),
        (("--serial", "A1"), {"serial": "A1"}),
        (("--public-key", "cd"), {"key": "cd"}),
    ],
)
def test_certificates_are_revoked(admin: FakeAdmin, fl: Fl, options: tuple[str, ...], request_: dict[str, str]) -> None:
    """By name, serial or key; the table has what is denied now."""
    status = pb.CertificateStatus(serial="a1", name="edge-7", reason="stolen")
    admin.responses["RevokeCertificates"] = pb.RevokeCertificatesResponse(revoked=[status])
    done = fl("clients", "revoke", *options, "--reason", "stolen")
    assert done.exit_code == 0, done.stderr
    assert sent(admin) == pb.RevokeCertificatesRequest(reason="stolen", **request_)
    assert "edge-7" in done.stdout


@pytest.mark.parametrize("options", [(), ("edge-7", "--serial", "a1"), ("--serial", "a1", "--public-key", "cd")])
def test_one_thing_is_revoked(admin: FakeAdmin, fl: Fl, options: tuple[str, ...]) -> None:
    """None or two are refused."""
    done = fl("clients", "revoke", *options, "--reason", "x")
    assert (done.exit_code, admin.requests) == (2, [])
    assert "expected one of NAME, --serial and --public-key" in done.stderr
