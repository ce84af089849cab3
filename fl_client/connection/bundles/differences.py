"""Bundles made of a held one and a difference, in fewer bytes. Whatever is wrong, the bundle itself is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from fl_client.connection.bundles.bundle import ResourceKey, key_of_resource
from fl_client.connection.bundles.download import Download
from fl_client.connection.bundles.expected import HEADER_BYTES, ExpectedBundle, kind_text
from fl_client.connection.link import Backoff, Link, Session
from fl_client.connection.messages import log_text
from fl_client.errors import BrokenTransfer, GivenUp, ResourceGone, WorkFailed
from protos.buffers import BufferPool, zeros
from protos.codec import digest_bytes, digest_of
from protos.differences import WORD_BYTES, DifferenceError, apply_difference
from protos.fl.v1 import tensor_pb2

log = structlog.get_logger()

MAX_BROKEN = 5
"""Transfers of a difference with damaged bytes after which the bundle is fetched."""

_Name = tuple[ResourceKey, bytes]
"""Key of a resource, and its digest."""


class Differences:
    """Keeps the bytes that a later bundle may be a difference to, and fetches differences to them.

    Only bytes of resources that a run names as bases are kept, besides the bundles that are made of them.
    """

    def __init__(self, link: Link, memory: BufferPool, on_bytes: Callable[[int], None]) -> None:
        self._link = link
        self._memory = memory
        self._on_bytes = on_bytes
        self._bases: dict[_Name, memoryview] = {}
        """Encoded bytes. By kind too: a model and a direction of the same bytes are released at other times."""

    def keep(self, resource: tensor_pb2.Resource, data: memoryview) -> None:
        """Keep the bytes of a fetched resource, if a later one may be a difference to it. They must not change."""
        self._bases.pop(_name(resource, resource.difference.base), None)
        if resource.is_base:
            self._bases[_name(resource, resource.digest)] = data

    def release_others(self, resources: Iterable[tensor_pb2.Resource]) -> None:
        """Release what is neither one of an assignment's resources nor the base of one."""
        used = {_name(each, digest) for each in resources for digest in (each.digest, each.difference.base)}
        self._bases = {name: data for name, data in self._bases.items() if name in used}

    async def bundle(self, expected: ExpectedBundle) -> memoryview | None:
        """The bytes of a resource, made of a kept base and a fetched difference. None: the resource must be fetched."""
        difference = expected.resource.difference
        base = self._bases.get(_name(expected.resource, difference.base))
        if base is None:
            return None
        try:
            _check(difference, expected, base)
            return await self._made(base, difference, expected)
        except (DifferenceError, WorkFailed, ResourceGone, GivenUp) as error:
            reason = log_text(str(error))
            log.warning("difference_not_used", resource=kind_text(expected.resource), reason=reason)
            return None

    async def _made(self, base: memoryview, difference: tensor_pb2.Difference, expected: ExpectedBundle) -> memoryview:
        came = await self._fetch(ExpectedDifference(difference, expected.run_id))
        data = self._memory.take(expected.size_bytes)
        await asyncio.to_thread(apply_difference, base, came, difference.word_bytes, data)
        if not await asyncio.to_thread(expected.has_digest, data):
            raise DifferenceError("expected the difference to make the bundle, got bytes of another digest")
        return data

    async def _fetch(self, expected: ExpectedDifference) -> memoryview:
        data = zeros(expected.difference.size_bytes)
        download = Download(expected, data, Backoff(self._link.delays), self._on_bytes)
        broken = 0

        async def resume(session: Session) -> None:
            nonlocal broken
            try:
                await download.resume(session)
            except BrokenTransfer as error:
                broken += 1
                if broken == MAX_BROKEN:
                    raise DifferenceError(f"broken {broken} times: {error}") from error
                raise

        await self._link.call_with_retry(resume, download.backoff)
        if await asyncio.to_thread(digest_of, data) != digest_bytes(expected.digest):
            raise DifferenceError("expected the bytes of the difference, got bytes of another digest")
        return data


@dataclass(frozen=True, slots=True)
class ExpectedDifference:
    """The bytes of a difference."""

    difference: tensor_pb2.Difference
    run_id: str = ""
    """Run of the assignment."""

    @property
    def digest(self) -> tensor_pb2.Digest:
        """The digest to ask for."""
        return self.difference.digest

    @property
    def header_bytes(self) -> int:
        """Largest header that is parsed: a manifest without tensors."""
        return HEADER_BYTES

    def check(self, manifest: tensor_pb2.Manifest) -> None:
        """Raises DifferenceError for a manifest of anything but this difference."""
        expected = tensor_pb2.Manifest(size_bytes=self.difference.size_bytes, encoding=tensor_pb2.ENCODING_PLAIN)
        if manifest != expected:
            raise DifferenceError(
                f"expected a manifest of {expected.size_bytes} bytes without tensors, got {manifest.size_bytes} bytes, "
                f"{len(manifest.tensors)} tensors and encoding number {manifest.encoding}"
            )


def _name(resource: tensor_pb2.Resource, digest: tensor_pb2.Digest) -> _Name:
    return key_of_resource(resource), digest.value


def _check(difference: tensor_pb2.Difference, expected: ExpectedBundle, base: memoryview) -> None:
    """Raises DifferenceError unless a described difference can make the bundle from a base of so many bytes."""
    if difference.word_bytes not in WORD_BYTES:
        raise DifferenceError(f"expected words of 1, 2, 4 or 8 bytes, got {difference.word_bytes}")
    if not expected.resource.size_bytes == expected.size_bytes == len(base):
        raise DifferenceError(
            f"expected a bundle and a base of {expected.size_bytes} bytes, got {expected.resource.size_bytes} and "
            f"{len(base)}"
        )
    if not 0 < difference.size_bytes < expected.size_bytes:
        raise DifferenceError(
            f"expected a difference of 1 to {expected.size_bytes - 1} bytes, got {difference.size_bytes}"
        )
    try:
        digest_bytes(difference.digest)
    except ValueError as error:
        raise DifferenceError(f"difference: {error}") from None
