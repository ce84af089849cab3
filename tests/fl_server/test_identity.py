"""Names in certificates, and what a caller with one may do."""

from __future__ import annotations

import pytest

from fl_server.errors import Forbidden
from fl_server.identity import ANYBODY, Identity, actor, caller, from_names, require_name, require_role


@pytest.fixture
def edge():
    """The call is client edge-3's."""
    token = caller.set(Identity("client", "edge-3"))
    yield
    caller.reset(token)


@pytest.mark.parametrize(
    ("names", "identity"),
    [
        ([b"127.0.0.1", b"fl://client/edge-3"], Identity("client", "edge-3")),
        ([b"fl://admin/alice", b"fl://client/b"], Identity("admin", "alice")),
        ([b"fl://client/a/b"], None),
        ([b"fl://client"], None),
        ([b"https://client/edge-3"], None),
        ([b"\xff\xfe"], None),
        ([], None),
    ],
)
def test_the_identity_among_names(names, identity):
    """The first name of our scheme with a role and a holder; none where there is no such."""
    assert from_names(names) == identity


def test_a_role_and_a_name_are_held_to(edge):
    """The right ones pass; another is refused with who it is and what is needed."""
    require_role("client")
    require_name("edge-3")
    with pytest.raises(Forbidden, match="client:edge-3 is not allowed to do this; needed: .* the role admin"):
        require_role("admin")
    with pytest.raises(Forbidden, match="needed: a certificate with the name 'edge-4', or client_id = 'edge-3'"):
        require_name("edge-4")
    assert actor() == "client:edge-3"


def test_without_certificates_everybody_passes():
    """Plain text has no identities; history calls an operator admin."""
    assert caller.get() is ANYBODY
    require_role("admin")
    require_name("anything")
    assert actor() == "admin"


def test_a_certificate_cannot_claim_to_be_anybody():
    """An identity with the words of ANYBODY is still one, and is held to its role."""
    token = caller.set(Identity("anybody", ""))
    with pytest.raises(Forbidden):
        require_role("admin")
    caller.reset(token)
