"""The frozen parameters of a model as a resource: their digest and size, without the bundle that they would be.

Both sides compute it from their own copies, so that equal parameters need not be sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from protos.codec import Layout, digest_message, pieces_of
from protos.digests import digest_of, digest_text
from protos.fl.v1.tensor_pb2 import ENCODING_PLAIN, RESOURCE_KIND_FROZEN, Resource


def frozen_resource(frozen: Mapping[str, Tensor]) -> Resource | None:
    """The resource of these parameters, in the order of the model; None if there are none.

    The digest is that of the bundle in which they would be sent. It is computed tensor by tensor, and no tensor on the
    CPU is copied. Raises LayoutError for a dtype that the wire does not have.
    """
    if not frozen:
        return None
    layout = Layout.of(frozen)
    digest = digest_of(layout.table, pieces=pieces_of(frozen, layout))
    return Resource(
        kind=RESOURCE_KIND_FROZEN, digest=digest_message(digest), size_bytes=layout.size_bytes, encoding=ENCODING_PLAIN
    )


def frozen_text(resource: Resource | None) -> str:
    """The digest as text; empty for a model without frozen parameters."""
    return "" if resource is None else digest_text(resource.digest.value)


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The digest of each tensor's bytes, by name."""
    return {
        name: digest_of(pieces=pieces_of({name: tensor}, Layout.of({name: tensor}))) for name, tensor in tensors.items()
    }
