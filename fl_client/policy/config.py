"""The policy file: TOML, checked once. A rule that is absent allows everything; an empty list allows nothing.

It names the CAs that a site trusts by the SHA-256 of their certificates.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import AfterValidator, Field

from fl_client.errors import ConfigError
from fl_client.settings.config import WindowText, ZoneName
from fl_common.certificates.pem import fingerprint
from fl_common.settings import Section, SettingsError, read_settings
from fl_common.signatures import check_signer

_SHA256 = re.compile(r"[0-9a-f]{64}")


def _hex(value: str) -> str:
    """64 hex digits. openssl writes "SHA256 Fingerprint=AB:CD:..."; both that and plain digits are accepted."""
    digits = re.sub(r"^(sha256( fingerprint)?[:=])", "", value.strip().lower()).replace(":", "")
    if _SHA256.fullmatch(digits) is None:
        raise ValueError(f"expected a SHA-256 fingerprint of 64 hex digits, with or without colons, got {value!r}")
    return digits


def _source(value: str) -> str:
    return f"sha256:{_hex(value)}"


class CoordinatorRules(Section):
    """The coordinators that the device works for. Without a key any coordinator that the settings name is accepted."""

    ids: list[str] | None = None
    """Ids of coordinators. A coordinator's id is in the log of its start, and in the daemon's log as `registered`."""
    ca_sha256: list[Annotated[str, AfterValidator(_hex)]] | None = None
    """SHA-256 of the CA certificates that may sign a coordinator's certificate, as `openssl x509 -fingerprint -sha256`
    prints it. Other certificates in tls.ca are not trusted. Nothing is sent to a coordinator of another authority."""


class TaskRules(Section):
    """The tasks that may be trained and evaluated."""

    allow: list[str] | None = None
    """Names of tasks. Absent: every task of this device."""
    fingerprints: dict[str, list[Annotated[str, AfterValidator(_source)]]] = Field(default_factory=dict)
    """Digests of the task's code that are accepted, by the task's name: {digits = ["sha256:..."]}."""


class AlgorithmRules(Section):
    """The methods whose client half may run."""

    allow: list[str] | None = None
    """Names of methods: ["fedavg", "fedcm"]. Absent: every method."""
    optimizers: list[str] | None = None
    """Names of the optimizers of local steps: ["sgd", "adamw"]. Plain SGD is "sgd". Absent: every optimizer."""


class WorkRules(Section):
    """The most and the least of one assignment."""

    max_epochs: int | None = Field(default=None, ge=1)
    """Passes over the local examples, a full gradient included. Steps count as the passes that they begin."""
    max_steps: int | None = Field(default=None, ge=1)
    """Mini-batch steps, and batches of a full gradient."""
    min_batch_size: int = Field(default=4, ge=1)
    """Examples of a step. A step of one example reveals it. 1: any."""
    min_examples: int = Field(default=16, ge=1)
    """Different local examples that the work uses. 1: any."""
    min_steps: int = Field(default=1, ge=1)
    """Local steps of work that trains. More steps mix more batches. 1: any."""
    min_clients: int = Field(default=3, ge=1)
    """Accepted updates without which the coordinator commits no round, as it says itself. 1: any."""
    max_model_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the model, frozen part included."""


class DayRules(Section):
    """The most of one day, from midnight to midnight in the time zone of [hours]. Counts survive restarts."""

    max_assignments: int | None = Field(default=None, ge=1)
    """Assignments begun, evaluations included. Each exchange of a round is one."""
    max_steps: int | None = Field(default=None, ge=1)
    """Mini-batch steps."""
    max_examples: int | None = Field(default=None, ge=1)
    """Examples that were trained or evaluated on. An example counts in each epoch again."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Seconds of computing."""
    max_bytes_down: int | None = Field(default=None, ge=1)
    """Tensor bytes received."""
    max_bytes_up: int | None = Field(default=None, ge=1)
    """Tensor bytes sent."""


class HourRules(Section):
    """The hours of work. Unlike gates.windows they end a round in progress."""

    windows: list[WindowText] | None = None
    """Local times: "22:00-06:00", "mon-fri 18:30-24:00". Absent: any time."""
    timezone: ZoneName = ""
    """Time zone of the windows and of [day], such as "Europe/Zurich". "": the device's own."""


class PrivacyRules(Section):
    """The least privacy. Runs with less noise or a larger delta get the values here; runs without any are refused.

    Without any key, training needs no differential privacy.
    """

    require: bool = False
    """Refuse training that states no differential privacy."""
    unit: Literal["record"] | None = None
    """What the noise must hide: "record", each example of this device. Absent: any unit."""
    max_epsilon: float | None = Field(default=None, gt=0)
    """The most that this device's data may spend over all runs together. Work that would exceed it is refused."""
    max_delta: float | None = Field(default=None, gt=0, lt=1)
    """The largest delta that epsilon is computed at. A smaller one of a run stays."""
    min_noise_multiplier: float | None = Field(default=None, gt=0)
    """The least noise of a step, as a multiple of the clip. More noise of a run stays."""

    @property
    def wanted(self) -> str:
        """The first key that demands privacy, in words; empty if none does."""
        for name, value in self.model_dump(exclude_defaults=True).items():
            shown = (
                str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
            )
            return f"privacy.{name} is {shown}"
        return ""


class SecureAggregationRules(Section):
    """The sums that updates of this device may enter. Without a key any run is accepted, also one without masks."""

    require: bool = False
    """Refuse training whose update the coordinator would see alone."""
    min_clients: int = Field(default=3, ge=3)
    """Fewest clients whose updates are summed, if `work.min_clients` is not more."""
    max_corrupt: float = Field(default=0.1, ge=0, lt=1 / 3)
    """Share of a cohort that may help the coordinator. A run that allows for fewer is refused."""
    authority: Path | None = None
    """PEM file of the authority of the clients' certificates, whose key the coordinator does not have: then it cannot
    invent clients. Absent: the authorities of tls.ca, which a coordinator may hold itself."""
    peers: dict[str, Annotated[str, AfterValidator(_hex)]] = Field(default_factory=dict)
    """SHA-256 of the public keys of the only clients that this device is summed with, by their names: of the
    SubjectPublicKeyInfo in DER. They take the place of an authority."""


class PackageRules(Section):
    """The code from the coordinator that may run here. Without signers none does."""

    signers: list[Annotated[str, AfterValidator(check_signer)]] = Field(default_factory=list)
    """Public keys that must have signed a package and each of its wheels, as `fl release key` prints them."""
    approval: bool = True
    """The owner must approve each package: `fl-client packages approve`. false: the signatures are enough."""


class ShareRules(Section):
    """What may leave the device besides updates."""

    evaluations: bool = True
    """Results of evaluations on this device's held-out examples."""
    labels: bool = True
    """The labels of the settings."""
    device: bool = True
    """Kind, name and memory of the training device."""
    privacy: bool = True
    """What this device's data has spent over all runs, with each update that was trained with privacy."""


class Policy(Section):
    """All rules of a site."""

    coordinators: CoordinatorRules = CoordinatorRules()
    tasks: TaskRules = TaskRules()
    algorithms: AlgorithmRules = AlgorithmRules()
    work: WorkRules = WorkRules()
    day: DayRules = DayRules()
    hours: HourRules = HourRules()
    privacy: PrivacyRules = PrivacyRules()
    secure_aggregation: SecureAggregationRules = SecureAggregationRules()
    packages: PackageRules = PackageRules()
    share: ShareRules = ShareRules()
    allow_unknown_demands: bool = False
    """Accept assignments with fields that this version does not know, which a newer coordinator may send. They may be
    demands that this version would not meet."""


NO_FLOORS = WorkRules(min_batch_size=1, min_examples=1, min_clients=1)
NO_POLICY = Policy(work=NO_FLOORS, allow_unknown_demands=True)
"""The rules of a device without a policy file: none."""


def read_policy(path: Path) -> Policy:
    """Read a policy file. Raises ConfigError that names file and key, also for a file that every user can change."""
    try:
        policy = read_settings(path, Policy)
        mode = stat.S_IMODE(path.stat().st_mode)
    except (SettingsError, OSError) as error:
        raise ConfigError(f"policy: {error}") from None
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"policy: expected a file that only its owner can change, got {path} with mode {mode:04o}: chmod o-w {path}"
        )
    return policy


def trusted_certificates(bundle: bytes, pins: Collection[str]) -> bytes:
    """The pinned certificates of a bundle in PEM, as PEM. Empty if there are none. Raises ValueError for no PEM."""
    certificates = x509.load_pem_x509_certificates(bundle)
    return b"".join(
        certificate.public_bytes(Encoding.PEM) for certificate in certificates if fingerprint(certificate) in pins
    )
