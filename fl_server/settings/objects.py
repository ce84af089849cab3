"""The section [objects] of server.toml, and the URL of an object store in `storage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from fl_common.settings import Section

SCHEMES = ("s3", "gs", "az", "file")


def storage_parts(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix of a URL in `storage`. A folder has no bucket. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(
            'expected a URL such as "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix" or '
            f'"file:///folder", without credentials, got one that begins with {url.partition(":")[0]!r}: keys come '
            "from the environment"
        )
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError(f'expected an absolute folder, such as "file:///srv/objects", got {url!r}')
    elif not parts.netloc:
        raise ValueError(f'expected a bucket, as in "{parts.scheme}://bucket/prefix", got {url!r}')
    return parts.scheme, parts.netloc, parts.path.strip("/")


def _checked(url: str) -> str:
    storage_parts(url)
    return url.rstrip("/")


StorageUrl = Annotated[str, AfterValidator(_checked)]
"""The URL of an object store, without credentials."""


class ObjectsConfig(Section):
    """The object store that `storage` names. Its credentials come from the environment, such as AWS_ACCESS_KEY_ID."""

    endpoint: str = ""
    """Address of a store that speaks the protocol of S3 or Azure, such as "https://minio.internal:9000". Plain text
    only with http:// here. "": the provider's own, or AWS_ENDPOINT_URL."""
    region: str = ""
    """Region of a bucket in S3. "": AWS_REGION, or us-east-1."""
    ca_file: Path | None = None
    """PEM file of an authority that the endpoint's certificate is of, beside those of the system."""
    request_s: float = Field(default=30.0, gt=0)
    """Longest time of one request, which carries 5 MiB at most."""
    retry_s: float = Field(default=60.0, ge=0, le=280)
    """How long a failed request is repeated, with growing waits. After it an upload is asked for again later, and a run
    waits, and says why. 0: never."""
    cache_mib: int = Field(default=8192, ge=64)
    """Disk space in `state_dir` for copies of stored updates, of models but the latest, and of parts that were read
    from the store. Best: the updates of one round."""
