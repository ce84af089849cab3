"""The bundles of the current assignment: fetched once, and held under their digests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from fl_client.connection.bundles.download import Differences, Download
from fl_client.connection.bundles.expected import (
    Bundle,
    ExpectedBundle,
    ExpectedBundles,
    Layouts,
    ResourceKey,
    key_of_resource,
)
from fl_client.connection.link import Backoff, Link
from fl_client.errors import beyond_limits
from protos import codec
from protos.buffers import BufferPool
from protos.digests import digest_message
from protos.fl.v1 import tensor_pb2

FULL_TRIES = 3
"""Times that a bundle is fetched from its start because its digest was wrong although every chunk was right."""

MOST_NAMED = 64
"""Held resources that a registration names; coordinators take no more."""

_Name = tuple[ResourceKey, bytes, bytes]
"""Key of a resource, its digest, and the key of its encoding's random numbers."""


class BundleCache:
    """Holds the bundles of the current assignment by digest, so that a held bundle is never fetched again."""

    def __init__(self, link: Link, max_bytes: int, on_bytes: Callable[[int], None]) -> None:
        self._link = link
        self._on_bytes = on_bytes
        self._expected = ExpectedBundles(max_bytes)
        self._memory = BufferPool()
        self._differences = Differences(link, self._memory, on_bytes)
        # Training and evaluation may need the same model at the same time: only one of them fetches it.
        self._lock = asyncio.Lock()
        # By kind too: a model and a direction of zeros have the same bytes and different manifests.
        self._held: dict[_Name, Bundle] = {}

    def held(self) -> list[tensor_pb2.Digest]:
        """Digests of the resources that are not fetched again if the next assignment needs them; MOST_NAMED at most."""
        return [digest_message(value) for value in sorted({value for _, value, _ in self._held})[:MOST_NAMED]]

    async def get(
        self, resources: Iterable[tensor_pb2.Resource], layouts: Layouts, run_id: str = ""
    ) -> dict[ResourceKey, Bundle]:
        """The bundles of an assignment by kind, and by name if they have one. All others are released first.

        layouts: of this device's model. Nothing else is fetched. run_id: of the assignment.

        Raises:
            WorkFailed: a resource that this device cannot hold or read.
            ResourceGone: the coordinator no longer sends a resource.
        """
        async with self._lock:
            wanted = {_name_of(resource): self._expected.of(resource, layouts, run_id) for resource in resources}
            self._differences.release_others(bundle.resource for bundle in wanted.values())
            held = self._held = {name: bundle for name, bundle in self._held.items() if name in wanted}
            for name, bundle in wanted.items():
                if name not in held:
                    held[name] = await self._fetch(bundle)
            return {name[0]: held[name] for name in wanted}

    async def _fetch(self, expected: ExpectedBundle) -> Bundle:
        data = await self._differences.bundle(expected)
        if data is None:
            data = await self._fetch_whole(expected)
        bundle = await asyncio.to_thread(expected.decoded, data)
        self._differences.keep(expected.resource, data)
        return bundle

    async def _fetch_whole(self, expected: ExpectedBundle) -> memoryview:
        for _ in range(FULL_TRIES):
            data = self._memory.take(expected.size_bytes)
            download = Download(expected, data, Backoff(self._link.delays), self._on_bytes)
            await self._link.call_with_retry(download.resume, download.backoff)
            if download.described and await asyncio.to_thread(expected.has_digest, data):
                return data
        digest = codec.digest_text(codec.digest_bytes(expected.digest))
        raise beyond_limits(f"fetched {digest} {FULL_TRIES} times and got bytes of another digest each time")


def _name_of(resource: tensor_pb2.Resource) -> _Name:
    return key_of_resource(resource), resource.digest.value, resource.encoding_key
