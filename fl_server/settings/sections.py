"""The sections of server.toml about limits, connections, the object store, certificates and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fl_common.certificates.tls_version import TlsVersion
from fl_common.proxies import ENVIRONMENT, ProxySetting
from fl_common.settings import Address, Section, is_loopback
from protos.wire import CHUNK_BYTES, MAX_CHUNK_BYTES


class LimitsConfig(Section):
    """Limits of one client and of all clients."""

    max_update_mib: int = Field(default=2048, ge=1)
    """Largest update."""
    max_model_mib: int = Field(default=1024, ge=1)
    """Largest memory of the tensors that building a task's model takes, frozen ones included; the options of a task
    may size its model."""
    max_models_mib: int = Field(default=4096, ge=1)
    """Largest memory of the models and directions of all runs that have not ended. A further run is refused."""
    chunk_bytes: int = Field(default=CHUNK_BYTES, ge=64 << 10, le=MAX_CHUNK_BYTES)
    """Size of the chunks sent, and the best size of those received."""
    reattach_grace_s: float = Field(default=20.0, gt=0)
    """Wait for a client with a lost stream, and after a start for the clients of before."""
    lost_after_s: float = Field(default=300.0, gt=0)
    """How long a run that has begun waits for a lost client before it goes on without it, if it has its quorum."""
    stall_s: float = Field(default=60.0, gt=0)
    """An upload that receives no header, or less than `chunk_bytes`, in this time is ended; it resumes at its
    offset."""
    max_clients: int = Field(default=20_000, ge=1)
    """Most open sessions. Each needs an open file; the process raises its soft limit to its hard limit."""
    registrations_per_s: float = Field(default=300.0, gt=0)
    """Registrations a second; those of two seconds may come at once. Each further client gets a time slot and waits
    in its call up to ten seconds, beyond that it is asked to call again."""
    comebacks_per_min: float = Field(default=10.0, gt=0)
    """Reports of a client that it may train again, a minute. A report above this rate takes effect later."""
    history_per_minute: int = Field(default=5, ge=0)
    """History rows a minute for each client and event; one row has the number of the others. 0: no limit."""
    refusals_per_minute: int = Field(default=10, ge=0)
    """Audit rows a minute for refused calls of one caller from one address, 100 over all; one row has the number of
    the others. 0: no limit."""
    log_lines_per_minute: int = Field(default=20, ge=0)
    """Log lines a minute of one event about one client or caller; the next has the number of the others as
    `repeated`. 0: no limit."""
    task_memory_mib: int = Field(default=0, ge=0)
    """Memory of the process of a task from outside. 0: three quarters of the machine's or the container's."""
    task_load_s: float = Field(default=300.0, gt=0)
    """Time for loading a task, method or reducer from outside and for model(); then the creation of the run is
    refused. A start tries once more before the run fails."""
    evaluation_s: float = Field(default=3600.0, gt=0)
    """Time for one evaluation on the server. After it the run fails."""
    method_s: float = Field(default=3600.0, gt=0)
    """Time for one computation with a method or a reducer from outside; then the run fails."""
    restore_wait_s: float = Field(default=10.0, ge=0)
    """How long a start waits for runs with code from outside before it serves the others."""


class TransfersConfig(Section):
    """Limits of one client's calls. A call above them is refused with RESOURCE_EXHAUSTED and a time to wait."""

    uploads_at_once: int = Field(default=4, ge=1)
    """Streams of SubmitUpdate; a daemon has one for each assignment under way."""
    ahead_mib: float = Field(default=1.0, ge=0.0625, le=64)
    """MiB that a call may send before the coordinator reads them: about what an upload sends in a round trip. 1
    allows 6 MB/s at 200 ms, 12 50 MB/s. A busy coordinator needs this much memory for each upload; a hostile client
    can fill it on each of its calls."""
    downloads_at_once: int = Field(default=4, ge=1)
    """Streams of FetchModel; a daemon has one. Each holds two chunks in memory until its reader takes them."""
    queries_at_once: int = Field(default=4, ge=1)
    """Calls of QueryUpload and ReportEvaluation."""
    attends_at_once: int = Field(default=8, ge=1)
    """Streams of Attend, old ones that have not ended yet included."""
    calls: int = Field(default=200, ge=1)
    """Calls of all these kinds in a burst; a new assignment grants a new one."""
    calls_per_s: float = Field(default=20.0, gt=0)
    """Calls a second beyond the burst."""
    fetches: int = Field(default=16, ge=1)
    """Whole fetches of one resource for one assignment; a daemon fetches it once."""
    fetch_again_s: float = Field(default=30.0, gt=0)
    """Above that, one fetch in this time is allowed."""
    bytes_per_s: float = Field(default=0.0, ge=0)
    """Tensor bytes a second, up and down together. Transfers are slowed down, not refused. 0: no limit."""
    kept_files: int = Field(default=4, ge=1)
    """Unfinished uploads kept on disk, over all runs; the oldest that no stream writes makes room."""
    kept_mib: int = Field(default=4096, ge=1)
    """Disk space for them, with the same rule. One upload of any size is always kept."""
    messages_waiting: int = Field(default=256, ge=1)
    """An Attend stream is ended when more messages than this wait and none was read for 30 s; the client registers
    again."""


class ConnectionsConfig(Section):
    """Limits of open connections.

    The number of connections of clients follows from `limits.max_clients` and from the process's limit on open files. A
    quarter of that limit is reserved for ledger, checkpoints and updates.
    """

    handshake_s: float = Field(default=10.0, gt=0, le=600)
    """A connection is closed if its TLS and HTTP/2 handshakes take longer; at `metrics_listen`, its request."""
    idle_s: float = Field(default=300.0, ge=1, le=86_400)
    """A connection without a call is closed after this time."""
    admin: int = Field(default=128, ge=1, le=65_536)
    """Connections to `admin_listen` at once, and as many to `token_listen`."""
    enrollment: int = Field(default=1024, ge=1, le=65_536)
    """Connections to `enroll_listen` at once; each is closed after a minute."""
    health: int = Field(default=64, ge=1, le=65_536)
    """Connections to `health_listen` at once; each is closed after a minute."""
    metrics: int = Field(default=32, ge=1, le=65_536)
    """Connections to `metrics_listen` at once; for one more, the connection that has waited longest is closed."""
    calls_per_client: int = Field(default=64, ge=16, le=65_536)
    """Calls at once by the holder of one certificate, and on one connection. A daemon has fewer than ten."""


class WorkersConfig(Section):
    """Workers, `fl-server --role data`: processes that end the clients' streams of model bytes for the coordinator.

    A worker reads the coordinator's own settings, and after them a file with its certificate. Without this section the
    coordinator ends all streams itself.
    """

    listen: Address = "127.0.0.1:7076"
    """The coordinator's address for workers. A caller needs a certificate with the role worker."""
    coordinator: Address | None = None
    """`listen` as workers dial it. None: `listen`."""
    standbys: list[Address] = Field(default_factory=list)
    """The same of other coordinators of the same ledger: workers attach to whichever leads. One name for all of them,
    such as a Service of Kubernetes, needs no list."""
    serve: Address = "127.0.0.1:7077"
    """The workers' address for clients. All workers of a machine share it."""
    address: Address | None = None
    """`serve` as devices dial it. None: its port at the host at which they reach the coordinator."""
    age_s: float = Field(default=600.0, ge=1, le=86_400)
    """A client's connection to a worker ends after this time, give or take a tenth, and the client connects again: so
    a new worker gets its share. Calls in progress go on."""
    report_mib: float = Field(default=16.0, ge=0.0625, le=1024)
    """A worker reports the progress of a transfer after so many bytes, or a second. Bans and rates take effect then."""
    cache_mib: int = Field(default=4096, ge=1)
    """Disk space for a machine's copies of what clients fetch. The newest one is always kept."""


_YEAR_S = 31_536_000
OperatorRole = Literal["viewer", "operator", "enroller", "admin"]
Algorithm = Literal["RS256", "ES256", "EdDSA"]


class TlsConfig(Section):
    """Certificates and keys, as PEM files."""

    cert: Path
    """The coordinator's certificate."""
    key: Path
    """Its private key."""
    client_ca: Path | None = None
    """The CA of clients and admins. A caller needs a certificate that it signed, with the caller's name."""
    no_client_certificates: bool = False
    """Accept callers without a certificate: everyone who reaches `listen` can register as any client, and every
    program on this machine is an admin."""
    min_version: TlsVersion = "1.3"
    """Oldest TLS version of all ports. "1.2" is for peers that cannot do better."""


class WebTlsConfig(Section):
    """The certificate of the web page, with a key of its own: whoever gets the page's key is not the coordinator.

    Best from an authority that browsers know; devices should not trust it. `fl ca init --dir page-pki --host NAME`
    makes one for a page without such an authority.
    """

    cert: Path
    """PEM: the page's certificate, followed by the intermediate ones."""
    key: Path
    """Its private key, which only its owner may read. It must not be the key of `[tls]`."""


class WorkerTlsConfig(Section):
    """A worker's certificate for the coordinator, where it is another than the one that devices see, that of `[tls]`.

    An authority of `fl ca limited worker` can sign it: its key makes workers and nothing else, and devices need not
    trust it. Without this section a worker shows the certificate of `[tls]` to both.
    """

    cert: Path
    """The certificate, with the role worker."""
    key: Path
    """Its private key, which only its owner may read."""
    ca: Path
    """The authority of the coordinator's certificate."""


class EnrollmentConfig(Section):
    """The authority that signs certificates of devices, and its limits.

    With this section devices can renew their certificates at `listen`; with `enroll_listen` too they get their first
    one for a token.
    """

    ca_cert: Path
    """The authority's certificate: `ca.crt` of `fl ca init`. `tls.client_ca` must have it too."""
    ca_key: Path
    """Its private key, which only its owner may read: `ca.key`, or a mounted Secret of Kubernetes."""
    server_ca: Path | None = None
    """The authority that signed `tls.cert`; devices get it with their certificate. None: `ca_cert`."""
    lifetime_s: float = Field(default=86_400.0, ge=10, le=_YEAR_S)
    """Validity of a certificate. Daemons renew it at two thirds."""
    token_ttl_s: float = Field(default=3_600.0, gt=0, le=_YEAR_S)
    """Validity of a token that `fl enroll create` makes without `--ttl`."""
    expired_grace_s: float = Field(default=604_800.0, ge=0, le=_YEAR_S)
    """How long after its end the newest certificate of a name still proves the name for a new one. 0: a device that
    was off for longer needs a token."""
    requests_per_s: float = Field(default=100.0, gt=0)
    """Requests at `enroll_listen` a second; further ones wait up to ten seconds in their call, or are refused with
    a time to wait."""
    address_requests_per_s: float = Field(default=50.0, gt=0)
    """The same for one address, or one /64 network of IPv6."""
    address_failures_per_min: float = Field(default=30.0, gt=0)
    """Refused requests of one address a minute; further ones are refused unread."""
    claimed_labels: bool = True
    """Whether labels of a device's own settings count beside those of its token, which always win."""
    renewals_per_min: float = Field(default=10.0, gt=0)
    """Renewals of one client a minute."""


def _https_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError("expected a URL without a user and a password")
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))):
        raise ValueError(f"expected a URL https://..., or http://... of this machine, got {url!r}")
    return url


class OidcConfig(Section):
    """Tokens (JWT) of an OpenID Connect provider, which operators send to `token_listen`.

    A token must have the claims iss, aud, exp and iat.
    """

    issuer: str = Field(min_length=1)
    """The claim `iss` of tokens, exactly."""
    audience: str = Field(min_length=1)
    """The claim `aud` of tokens, or one of its values: a name for this coordinator alone."""
    jwks_url: Annotated[str, AfterValidator(_https_url)] | None = None
    """The provider's signing keys (JWKS), https only."""
    jwks_ca: Path | None = None
    """CA of that address, PEM; the system's authorities if it is missing."""
    proxy: ProxySetting = ENVIRONMENT
    """The HTTP proxy for `jwks_url`: "none", http://HOST:PORT, or "environment": https_proxy, except to the hosts
    of no_proxy."""
    jwks_file: Path | None = None
    """The signing keys in a file, in place of `jwks_url`."""
    refresh_s: float = Field(default=600.0, ge=10, le=86_400)
    """Age of the keys after which they are read again, so the longest use of a removed key. An unknown key is
    looked up at once, at most every 10 s."""
    algorithms: list[Algorithm] = Field(default=["RS256", "ES256", "EdDSA"], min_length=1)
    """Accepted signatures."""
    name_claim: str = Field(default="sub", min_length=1)
    """The claim with the operator's name. One that its holder can change lets one operator take another's name."""
    name_prefix: str = Field(default="oidc:", pattern=r"^[A-Za-z0-9._:@/-]{0,32}$")
    """Precedes the name, so that it is never a certificate's name. "": names of both kinds are the same people."""
    roles_claim: str = Field(default="groups", min_length=1)
    """The claim with the operator's groups, a list or a text with blanks. "a.b" is the key b in the claim a."""
    roles: dict[str, OperatorRole] = Field(min_length=1)
    """The role of each group; a token without any of these is refused."""
    leeway_s: float = Field(default=30.0, ge=0, le=300)
    """Difference of the clocks that is accepted."""
    most_lifetime_s: float = Field(default=14_400.0, gt=0, le=604_800)
    """Longest time from `iat` to `exp`. A token cannot be revoked: so long a removed operator keeps its roles."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("expected jwks_url or jwks_file, and not both")
        if self.jwks_ca is not None and self.jwks_url is None:
            raise ValueError("jwks_ca: expected jwks_url with it, found none")
        return self


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
    """Address of a store that speaks the provider's protocol, such as "https://minio.internal:9000", or a private one
    of the provider; with the account for az:// where it is no part of the host, "https://blob.internal/account". Plain
    text only with http:// here. "": the provider's own, or AWS_ENDPOINT_URL."""
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
