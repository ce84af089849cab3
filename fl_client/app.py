"""Builds the daemon from its settings: the only module that chooses and connects the concrete parts."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
import torch

from fl_client.assignments.executor import Services
from fl_client.audit.log import DeviceAudit, note_certificate, note_registered
from fl_client.connection.bundles.cache import BundleCache
from fl_client.connection.certificates import Certificates
from fl_client.connection.link import Link, RetryDelays
from fl_client.connection.reconnect import Endpoint
from fl_client.connection.session_manager import SessionManager
from fl_client.connection.transport import GrpcEnrollment, GrpcTransport
from fl_client.daemon import Daemon
from fl_client.enrollment.folder import CertificateFolder
from fl_client.enrollment.renewal import CertificateRenewal, Means
from fl_client.errors import StateError, TransportError
from fl_client.gates.availability import AvailabilityMonitor
from fl_client.gates.conditions import HostState, make_gates
from fl_client.gates.gate_set import GateSet
from fl_client.gates.state_directory import StateDirectory
from fl_client.monitoring.logs import Progress
from fl_client.monitoring.metrics import Metrics
from fl_client.packages.daemon import Packages
from fl_client.policy.budget import FILE, Budget, DailyUsage
from fl_client.policy.file import CHECK_S, PolicyFile, PolicyGate
from fl_client.policy.site import SitePolicy
from fl_client.privacy.charging import PrivacyCharging
from fl_client.privacy.files import AccountFiles
from fl_client.ranks.daemon import Ranks
from fl_client.secure_aggregation.members import FOLDER, Members
from fl_client.secure_aggregation.participant import Participant
from fl_client.settings import device as devices
from fl_client.settings.config import ClientConfig
from fl_client.settings.identity import identity_of
from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.disk import DiskThread, StorageLimits
from fl_client.storage.release_folder import ReleaseFolder, Taken
from fl_client.storage.state import FILES, RELEASES, StateDir
from fl_client.training.data import LocalTask, load_local_task, slow_start_logged
from fl_client.training.methods import load_optimizers_of, offers
from fl_client.training.trainer import Trainer
from fl_client.training.worker import Worker
from fl_common.allocator import keep_freed_memory
from fl_common.certificates.pem import Pem
from fl_common.files import restrict_permissions
from fl_common.metrics import package_version
from fl_common.proxies import proxy_for
from fl_common.settings import split_address
from fl_common.tracing.opening import open_traces
from fl_common.tracing.traces import UNTRACED, Traces
from protos.encodings import ENCODINGS
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

log = structlog.get_logger()


def run(config: ClientConfig, progress: Progress) -> bool:
    """Run a daemon until a signal ends it. Returns False if a training step does not end: the process must be killed.

    Raises:
        StartError: it cannot start.
        SettingsError: tracing is configured and not possible.
    """
    client_id, metrics = identity_of(config), Metrics()
    with ExitStack() as held:
        state = held.enter_context(StateDir(config.state_dir))
        if still := restrict_permissions(state.path, FILES):
            log.warning("state_is_open_to_others", files=len(still), first=str(still[0]), todo="chmod -R go= state_dir")
        _begin_accounts(state, {served.data for served in config.served})
        state.claim(client_id)
        for served in config.served:
            state.claim_data(served.data)
        if config.metrics_listen is not None:
            held.enter_context(metrics.serve(*split_address(config.metrics_listen)))
        traces = open_traces("fl-client")
        held.callback(traces.close)
        device = devices.choose(config.device)
        keep_freed_memory()
        if config.insecure_remote:  # at every start, as a reminder
            log.warning("insecure_remote", server=config.server, todo="add [tls]: ca, cert and key")
        tasks, trainers = [], []
        for number, served in enumerate(config.served):
            if served.package:
                continue  # its code is not here before the coordinator has sent it, and the owner lets it run
            local, trainer = _load(config, number, state, device, held, progress)
            log.info("starting", client=client_id, task=local.title, examples=len(local.train), device=str(device))
            tasks.append(local)
            trainers.append(trainer)
        metrics.set_device(device, sum(len(local.train) for local in tasks), config.state_dir)
        instruments = Instruments(metrics, progress, traces=traces, trainers=trainers)
        # The objects so far, most of them torch's, live as long as the process. Without this, full garbage collections
        # search all of them again and again.
        gc.freeze()
        return asyncio.run(_until_signal(config, tasks, state, instruments))


def _load(  # noqa: PLR0913, PLR0917 - parts of the daemon
    config: ClientConfig, number: int, state: StateDir, device: torch.device, held: ExitStack, progress: Progress
) -> tuple[LocalTask, Trainer]:
    """Load one of the tasks, its data and its model."""
    title = config.served[number].title
    progress.show("loading the task's data")
    log.info("loading_task", task=title)  # the last line of a process that its code ends
    with slow_start_logged(title):
        local = load_local_task(config, state, device, number)
        progress.show("making the task's model")
        trainer = _trainer(config, local, held)
        return replace(local, frozen=trainer.own_frozen()), trainer


def _begin_accounts(state: StateDir, names: Iterable[str]) -> None:
    """Make the privacy accounts before the directory is claimed, so that a missing one is known to be lost."""
    try:
        for name in {"", *names}:
            AccountFiles.of(state.path, name).begin()
    except OSError as error:
        raise StateError(f"state_dir: expected a directory that can be written, got {error}") from None


@dataclass(frozen=True, slots=True)
class Instruments:
    """The monitoring of a daemon, its delays and its clock."""

    metrics: Metrics
    progress: Progress
    delays: RetryDelays = field(default_factory=RetryDelays)
    clock: Callable[[], float] = time.time
    """Unix seconds, for the owner's time windows."""
    traces: Traces = UNTRACED
    threads: Callable[..., Executor] = ThreadPoolExecutor
    """Makes the pools of the daemon's threads."""
    transport: Callable[..., GrpcTransport] = GrpcTransport
    """Makes a connection to the coordinator."""
    trainers: Sequence[Trainer] = ()
    """The trainers with the models that the registration describes, one for each task. None: some without models."""


def build(config: ClientConfig, tasks: Sequence[LocalTask], state: StateDir, instruments: Instruments) -> Daemon:
    """Connect the parts of one daemon, inside a running event loop.

    Raises:
        ConfigError: the TLS files cannot be used, or a gate's sensor is not on this device.
    """
    device = tasks[0].device if tasks else devices.choose(config.device)
    link = Link(replace(instruments.delays, max_requested=config.limits.max_wait_s))
    worker = Worker(config.threads, instruments.threads)
    host = HostState(device, worker.idle_for, instruments.clock)
    file = PolicyFile(config.policy, min(CHECK_S, config.gates.check_s))
    policy_gates = [] if config.policy is None else [PolicyGate(file, instruments.clock)]
    gates = GateSet([*make_gates(config.gates, host), *policy_gates], config.gates.open_after_s)
    limits = StorageLimits(config.limits.max_runs, config.limits.max_kept_bytes)
    metrics, disk = instruments.metrics, DiskThread(instruments.threads)
    availability = AvailabilityMonitor(gates, config.gates, metrics, instruments.clock)
    state_directory = StateDirectory(state, disk, availability, config.gates.check_s)
    usage = DailyUsage(state.path / FILE, instruments.clock)
    site = SitePolicy(file, Budget(usage, state_directory, file), metrics, availability)
    trainers = [*(instruments.trainers or [_trainer(config, local, None) for local in tasks])]
    audit = DeviceAudit(state.path, metrics.audit_rows, config.server)
    members = partial(Members, state.path / FOLDER, identity_of(config))
    services = Services(
        link=link,
        bundles=BundleCache(link, config.max_bundle_bytes, site.received),
        trainers=trainers,
        packages=Packages(config, trainers, site, link, audit, lambda: device),
        worker=worker,
        disk=disk,
        state=state_directory,
        storage=DeviceStorage(state.pending, state.states, limits),
        availability=availability,
        policy=site,
        audit=audit,
        metrics=metrics,
        progress=instruments.progress,
        traces=instruments.traces,
        limits=config.limits,
        secure=Participant(members, partial(_certified, config), state_directory, site, link),
        privacy=PrivacyCharging(state.path, config.threads, state_directory, site, metrics),
        released=_released(config, state),
    )
    endpoint = DaemonEndpoint(config, tasks, services, instruments)
    return Daemon(SessionManager(endpoint, link), services, _renewal(config, endpoint.certificates, services))


def _released(config: ClientConfig, state: StateDir) -> Taken | None:
    """What this device needs to take releases; None if its owner takes none."""
    if (releases := config.releases) is None:
        return None
    folder = ReleaseFolder(releases.folder or state.path / RELEASES)
    return Taken(releases, folder, config.labels, config.max_bundle_bytes)


def _certified(config: ClientConfig) -> Pem | None:
    """The certificate files of this device now: they may have been renewed."""
    if (tls := config.tls) is None:
        return None
    return Pem(tls.cert.read_bytes(), tls.key.read_bytes(), tls.ca.read_bytes())


async def _until_signal(
    config: ClientConfig, tasks: Sequence[LocalTask], state: StateDir, instruments: Instruments
) -> bool:
    """Run until SIGTERM or SIGINT. A second one ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("stopping", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return await build(config, tasks, state, instruments).run(stop)


class DaemonEndpoint(Endpoint):
    """The coordinator of the settings, for this device's certificates and its site's policy."""

    def __init__(
        self, config: ClientConfig, tasks: Sequence[LocalTask], services: Services, instruments: Instruments
    ) -> None:
        """Raises ConfigError at the start, not at the first connection, for unusable TLS files."""
        super().__init__(config.server, *config.standbys)
        self._config, self._services, self._transport = config, services, instruments.transport
        self._constant = _registration(config, tasks)
        self.certificates: Certificates | None = None
        """None: the connection is in plain text."""
        if config.tls is not None:
            self.certificates = Certificates(config.tls, identity_of(config), instruments.metrics, instruments.delays)

    def connect(self) -> GrpcTransport:
        """See Endpoint."""
        pem, site = None, self._services.policy
        if self.certificates is None:
            site.trusted_ca(None)
        else:
            pem = self.certificates.current()
            note_certificate(self._services.audit, pem.cert)
            pem = replace(pem, ca=site.trusted_ca(pem.ca))
        config, server = self._config, self.server
        return self._transport(server, pem, self._services.traces, proxy_for(server, config.proxy), config.keepalive_s)

    async def renewed(self) -> None:
        """Wait for new certificates, or another policy, which raises."""
        causes = [self._services.policy.until_changed(), self._services.packages.until_changed()]
        if self.certificates is not None:
            causes.append(self.certificates.renewed())
        waits = [asyncio.ensure_future(cause) for cause in causes]
        try:
            for done in (await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))[0]:
                await done
        finally:
            for waiting in waits:
                waiting.cancel()

    def explained(self, error: TransportError) -> TransportError:
        """See Endpoint."""
        return error if self.certificates is None else self.certificates.explained(error)

    def accept(self, response: pb.RegisterResponse) -> None:
        """Accept a coordinator that the policy allows, with a row of the audit log."""
        audit = self._services.audit
        try:
            self._services.policy.check_coordinator(response)
        except TransportError as error:
            audit.note("coordinator_refused", response.coordinator_id, "policy", str(error))
            raise
        note_registered(audit, response, b"" if self.certificates is None else self.certificates.current().ca or b"")

    def registration(self) -> pb.RegisterRequest:
        """A registration request with what the daemon has and may do now."""
        availability = self._services.availability.availability_for_registration()
        request = pb.RegisterRequest(availability=availability, held=self._services.bundles.held())
        request.MergeFrom(self._constant)
        if (taken := self._services.released) is not None:
            request.releases.SetInParent()
            for model, version in taken.folder.in_use().items():
                request.releases.held.add(model=model, version=version)
        request.tasks.extend(self._services.packages.offers())
        request.packages.extend(self._services.packages.names)
        request.package_refusals.extend(self._services.packages.refusals())
        return self._services.policy.registration(request)


def _renewal(config: ClientConfig, certificates: Certificates | None, services: Services) -> CertificateRenewal | None:
    """The renewal of a certificate from the coordinator. None: the owner renews the files."""
    if certificates is None or config.tls is None or not config.tls.renew:
        return None
    folder = CertificateFolder(config.tls.folder.absolute())
    means = Means(folder, certificates, services.link, services.disk, services.metrics)
    if (address := config.tls.enroll_server) is not None:
        proxy, policy = proxy_for(address, config.proxy), services.policy
        means = replace(means, reenrollment=lambda ca: GrpcEnrollment(address, policy.trusted_ca(ca) or b"", proxy))
    return CertificateRenewal(means)


def _trainer(config: ClientConfig, local: LocalTask, held: ExitStack | None) -> Trainer:
    """held: ends the other ranks; None: there are none. Raises DeviceError if there are not enough devices for them."""
    compute = devices.Compute(config.precision, config.memory_format)
    optimizers, size = load_optimizers_of(config.optimizers), devices.count_ranks(config.processes, local.device)
    if size == 1 or held is None:
        return Trainer(local, compute=compute, optimizers=optimizers)
    ranks = Ranks(config, size, local.device)
    held.callback(ranks.close)
    return Trainer(local, compute=compute, optimizers=optimizers, together=ranks)


def _registration(config: ClientConfig, tasks: Sequence[LocalTask]) -> pb.RegisterRequest:
    """The part of a registration that stays the same while this process runs."""
    accounts = {"", *(local.data for local in tasks)}
    return pb.RegisterRequest(
        client_id=identity_of(config),
        instance_id=uuid.uuid4().hex,
        protocol=pb.ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
        software=f"impetus {package_version('impetus-fl')}",
        labels=config.labels,
        device=devices.describe(tasks[0].device if tasks else devices.choose(config.device)),
        tasks=[local.offer() for local in tasks],
        methods=offers(tasks[0].methods if tasks else {}),
        encodings=ENCODINGS.values(),
        privacy_resets=sum(AccountFiles.of(config.state_dir, name).resets() for name in accounts),
    )
