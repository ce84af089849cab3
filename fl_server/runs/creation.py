"""Creates runs, and loads the code that they name, only where this coordinator's own configuration allows it.

Any caller of the admin port can create a run, and importing a module runs its code. So a run may name a built-in task,
method or reducer, an entry point of an installed package, or a `module:attribute` that server.toml lists, and nothing
else. Code from outside gets limits of time. The run's configuration keeps the fingerprint of the code: a coordinator
that has other code after a restart does not go on with the run, whose rounds could not be repeated.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import FileIO

import structlog

from algorithms import AlgorithmError
from fl_common.allocator import free_what_failed
from fl_common.units import size
from fl_common.waiting import shielded
from fl_extensions import methods
from fl_extensions.naming import Kind, comma_separated, installed, is_known, unknown
from fl_server.aggregation.methods import build_algorithm, complete, outside_names
from fl_server.aggregation.outside_task.remote_task import RemoteTask, TaskProcesses
from fl_server.aggregation.task_model import with_own
from fl_server.errors import InvalidInput, RunExists
from fl_server.outside_calls import OutsideCode
from fl_server.privacy_accounts import Account, account_of
from fl_server.run.context import RunDependencies
from fl_server.run.evaluations import check_metric, directions_of, needs_metric, with_direction
from fl_server.run.models import ModelSource
from fl_server.run.run import Run
from fl_server.run.secure_stages import trust_of
from fl_server.run_settings.config import RunConfig, TaskSection
from fl_server.run_settings.sections import Fingerprint
from fl_server.runs.table import Audit, Deletions, RunTable
from fl_server.services import Services
from fl_server.settings.config import ServerConfig
from fl_server.store.errors import StoreError
from fl_server.store.records import ENDED, HistoryRecord, RunRecord
from fl_tasks import BUILT_IN, Task, TaskError, TaskNotListed, fingerprint, load_task
from fl_tasks.metrics import declared_directions
from fl_tasks.naming import TASKS, path_of
from protos.digests import digest_text

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A run's task, with the (version, source) that clients must have."""

    task: Task | RemoteTask
    fingerprint: tuple[str, str]
    directions: Mapping[str, bool]
    """Whether a lower value is better, for each metric whose direction the task declares."""


def load_allowed(section: TaskSection, config: ServerConfig, processes: TaskProcesses | None = None) -> LoadedTask:
    """The task of a run. processes: where one from outside runs; None: in this process.

    Raises InvalidInput for one that is not allowed, without importing anything, for an option that only server.toml may
    give, and for one that cannot be loaded.
    """
    listed, here = config.tasks, config.task_options.get(section.name, {})
    try:
        if processes is not None and _is_outside(section, config):
            remote = RemoteTask(processes, section.name, section.options, here)
            return LoadedTask(remote, remote.facts.fingerprint, remote.facts.directions)
        task = load_task(section.name, with_own(section.name, section.options, here, listed), listed)
        return LoadedTask(task, fingerprint(task), declared_directions(task))
    except TaskNotListed as error:
        raise InvalidInput(
            "task.name",
            f"a task that this coordinator may load: built in ({', '.join(BUILT_IN)}), an entry point of an installed"
            f" package, or listed under `tasks` in its server.toml ({', '.join(listed) or 'none is'})",
            section.name,
        ) from error
    except TaskError as error:
        raise not_loadable(error) from error


def in_its_own_process(section: TaskSection, services: Services) -> bool:
    """Whether a run's task runs in a process of its own. Raises TaskNotListed."""
    return services.processes is not None and _is_outside(section, services.config)


def _is_outside(section: TaskSection, config: ServerConfig) -> bool:
    """Whether the task is of another module than ours, though it may have a built-in one as its base."""
    return not path_of(section.name, config.tasks).startswith("fl_tasks.")


def outside_tasks(config: ServerConfig) -> bool:
    """Whether a run may name a task from outside: a listed one, or one of an installed package."""
    return bool(config.tasks) or bool(installed(TASKS))


def not_loadable(error: TaskError) -> InvalidInput:
    """The error for the creator of a run when the task's own code failed."""
    return InvalidInput("task", "a task that this server can load", error)


@dataclass(frozen=True, slots=True)
class _Part:
    """The method, the reducer or the rule for stale updates in a run's configuration."""

    kind: Kind
    load: Callable[[str, Collection[str]], methods.Code | None]
    field: str
    """The field with its name in the configuration."""
    key: str
    """The key of server.toml with the names that may be loaded."""


_METHOD = _Part(methods.METHODS, methods.load_method, "algorithm.name", "algorithms")


_REDUCER = _Part(methods.REDUCERS, methods.load_reducer, "round.reducer", "reducers")


_STALENESS = _Part(methods.STALENESS, methods.load_staleness, "round.staleness.kind", "staleness")


def load_code(config: RunConfig, settings: ServerConfig, *, ended: bool = False) -> RunConfig:
    """Load the code from outside that a run names. Returns its configuration with the fingerprints of that code.

    ended: the run is over and is only shown, so other code is no obstacle, and the fingerprints stay.

    Raises InvalidInput for one that is not allowed, without importing anything; for one that cannot be loaded; and for
    one whose code is not that of the configuration.
    """
    algorithm, round_ = config.algorithm, config.round
    method = _loaded(_METHOD, algorithm.name, settings.algorithms)
    reducer = _loaded(_REDUCER, round_.reducer, settings.reducers)
    staleness = round_.staleness
    rule = None if staleness is None else _loaded(_STALENESS, staleness.kind, settings.staleness)
    if ended:
        return config
    algorithm = algorithm.model_copy(update={"fingerprint": _checked(_METHOD, method, algorithm.fingerprint)})
    round_ = round_.model_copy(update={"reducer_fingerprint": _checked(_REDUCER, reducer, round_.reducer_fingerprint)})
    if staleness is not None:
        checked = _checked(_STALENESS, rule, staleness.fingerprint)
        round_ = round_.model_copy(update={"staleness": staleness.model_copy(update={"fingerprint": checked})})
    return config.model_copy(update={"algorithm": algorithm, "round": round_})


def _loaded(part: _Part, name: str, listed: Collection[str]) -> methods.Code | None:
    kind = part.kind
    if not is_known(kind, name):
        raise InvalidInput(part.field, *unknown(kind, name))
    try:
        return part.load(name, listed)
    except methods.NotListed as error:
        raise InvalidInput(
            part.field,
            f"{kind.one} that this coordinator may load: built in ({', '.join(kind.built_in)}), an entry point of an"
            f" installed package, or listed under `{part.key}` in its server.toml ({comma_separated(listed)})",
            name,
        ) from error
    except AlgorithmError as error:
        raise InvalidInput(part.field, f"{kind.one} that this coordinator can load", error) from error


def _checked(part: _Part, code: methods.Code | None, wanted: Fingerprint | None) -> Fingerprint | None:
    """The fingerprint of the code that is here. wanted: the configuration's."""
    here = None if code is None else Fingerprint(version=code.version, source=code.source)
    if wanted is not None and wanted != here:
        shown = "no fingerprint, for it is built in" if here is None else f"{here} on this coordinator"
        raise InvalidInput(
            part.field,
            f"the {part.kind.noun}'s code that the run was made with, {wanted}",
            f"{shown}: install that code again, or create another run with this one",
        )
    return here


class RunLoading:
    """Loads the code of runs that are created, restored or continued. Lives on the event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def code(self, run_id: str, config: RunConfig, *, ended: bool = False) -> RunConfig:
        """Load the method and the reducer, as `load_code`. Raises InvalidInput, CallTimedOut."""
        services = self._services
        load = partial(load_code, config, services.config, ended=ended)
        if names := outside_names(config):
            code = OutsideCode(run_id, names, loading=True)
            return await services.outside.call(code, services.config.limits.task_load_s, load)
        return await services.in_building(load)

    async def task(self, config: RunConfig) -> LoadedTask:
        """Load the task. Raises InvalidInput."""
        services = self._services
        return await services.in_building(load_allowed, config.task, services.config, services.processes)

    async def account(self, run_id: str, config: RunConfig) -> Account | None:
        """The account of a private run, with what it was charged so far; None for another run."""
        if config.client_privacy is None:
            return None
        ledger = self._services.ledger
        return Account.of(run_id, config, await ledger.do(ledger.store.charges, account_of(config)))

    async def _secret(self, record: RunRecord, config: RunConfig) -> bytes:
        """The secret of a private run; empty for another run, and for one that is over and has none any more."""
        if config.client_privacy is None:
            return b""
        try:
            return await self._services.in_io(self._services.secrets.read, record.run_id)
        except StoreError as error:
            if record.state in ENDED:
                return b""
            raise InvalidInput("privacy", "the secret of the run", str(error)) from error

    async def build(self, record: RunRecord, config: RunConfig, task: LoadedTask, most: int) -> Run:
        """A run whose models are not loaded. most: bytes of its model. Raises InvalidInput, AlgorithmError."""
        code = OutsideCode(record.run_id, outside_names(config))
        algorithm = await self._services.in_code(code, build_algorithm, config)
        directions = directions_of(config, task.directions)
        start = await self._services.in_compute(self._services.checkpoints.start, record.run_id)
        source = ModelSource(task.task, most, start, await self._secret(record, config))
        account = await self.account(record.run_id, config)
        dependencies = RunDependencies(task.fingerprint, algorithm, source, directions, account)
        return Run(self._services, record, config, dependencies)


class RunCreation:
    """Puts runs into the coordinator's table. Lives on the event loop."""

    def __init__(self, services: Services, table: RunTable, loading: RunLoading, deletions: Deletions) -> None:
        self._services, self._table, self._loading, self._deletions = services, table, loading, deletions
        self._audit = Audit(services.ledger)
        self._creating: dict[str, int] = {}
        """Runs that are being created, with the bytes that their models may take. A slow one holds up no other."""

    @property
    def deleted_ids(self) -> AbstractSet[str]:
        """Ids of runs that were or are being deleted."""
        return self._deletions.ids

    async def create(self, config: RunConfig, actor: str, start: FileIO | None = None) -> Run:
        """Check and store a run, and start it.

        start: the open file that `initial_model` means, which is closed here; None for a run without one.
        """

        async def create() -> Run:
            with start or nullcontext():
                run_id = self._free_id(config)
                self._creating[run_id] = 0  # a call at the same time must not take it
                try:
                    return await self._create(run_id, config, actor, start)
                except Exception as error:
                    if self._creating[run_id]:  # what there is of its model goes before another may take the room
                        free_what_failed(error)
                    raise
                finally:
                    del self._creating[run_id]

        # If its call is cancelled, a run that is in the ledger starts all the same.
        return await shielded(create())

    async def _create(self, run_id: str, config: RunConfig, actor: str, start: FileIO | None) -> Run:
        named, checkpoints = config.initial_model, self._services.checkpoints
        if named and start is None:
            raise unusable(named)
        log.info("run_being_created", run=run_id, actor=actor, task=config.task.name)
        try:
            async with self._refusals_kept(run_id, config, actor):
                config = await self._loading.code(run_id, config)
            config = await self._services.in_code(OutsideCode(run_id, outside_names(config)), complete, config)
            async with self._refusals_kept(run_id, config, actor):
                task = await self._loading.task(config)
            config = with_direction(config, directions_of(config, task.directions))
            # A crash before `create_run` may have left files under the id.
            await self._services.in_compute(checkpoints.remove_run, run_id)
            if start is not None:
                digest = await self._services.in_compute(checkpoints.keep_start, run_id, start)
                config = config.model_copy(update={"initial_model": digest_text(digest)})
            record = RunRecord(run_id, config.model_dump(exclude_none=True), "waiting", "", time.time())
            await self._begin_account(run_id, config)
            run = await self._build(record, config, task)
        except TaskError as error:
            raise not_loadable(error) from error
        except AlgorithmError as error:
            field = ".".join(filter(None, ("algorithm.parameters", error.parameter)))
            raise InvalidInput(field, "a value that the algorithm takes", error) from error
        what = ", ".join(filter(None, (config.task.name, config.algorithm.name, named and f"from {named}")))
        why = HistoryRecord(time.time(), actor, "run_created", run_id, what)
        await self._services.ledger.do(self._services.ledger.store.create_run, record, why)
        self._table.loaded[run_id] = run
        for client_id in self._services.fleet.attendance.roster.present():
            run.eligible.notify(client_id)
        log.info("run_created", run=run_id, actor=actor, task=config.task.name, algorithm=config.algorithm.name)
        run.start()
        return run

    async def _build(self, record: RunRecord, config: RunConfig, task: LoadedTask) -> Run:
        """The run with its first model. An error removes the files under its id."""
        run_id = record.run_id
        try:
            run = await self._loading.build(record, config, task, self._model_room(run_id))
            await run.model.load(config)
            check_metric(config, await run.model.reported_metrics() if needs_metric(config) else None)
            if config.secure_aggregation is not None:
                trust_of(run.context)
        except (InvalidInput, TaskError, AlgorithmError):
            await self._services.in_compute(self._services.checkpoints.remove_run, run_id)
            await self._services.in_io(self._services.secrets.remove, run_id)
            raise
        return run

    async def _begin_account(self, run_id: str, config: RunConfig) -> None:
        """Make the secret of a private run. Raises InvalidInput if its account is in use, or has no budget left."""
        if (account := await self._loading.account(run_id, config)) is None:
            return
        account.check()
        for run in self._table.loaded.values():
            if run.account is not None and run.account.name == account.name and not run.ended:
                expected = f"an account that no other run under way has, which {account.name!r} is not"
                raise InvalidInput("privacy.account", expected, f"the run {run.id}: wait for its end")
        await self._services.in_io(self._services.secrets.make, run_id)

    def _free_id(self, config: RunConfig) -> str:
        taken = {*self._table.loaded, *self._table.not_loaded, *self._deletions.ids, *self._creating}
        if config.name in taken:
            raise RunExists(config.name, deleted=config.name in self._deletions.ids)
        if config.name:
            return config.name
        base, number = config.base_id(), 1
        while f"{base}-{number}" in taken:
            number += 1
        return f"{base}-{number}"

    @asynccontextmanager
    async def _refusals_kept(self, run_id: str, config: RunConfig, actor: str) -> AsyncIterator[None]:
        """Code of the run is loaded in the block: a refusal goes into the history."""
        try:
            yield
        except InvalidInput as error:
            await self._audit.run_refused(actor, run_id, config.task.name, str(error))
            raise

    def _model_room(self, run_id: str) -> int:
        """Bytes that building another model may take, which it then has. Raises InvalidInput if there is no room."""
        limits, runs = self._services.config.limits, self._table.loaded.values()
        used = sum(run.model.size_bytes for run in runs if not run.ended) + sum(self._creating.values())
        if (left := (limits.max_models_mib << 20) - used) <= 0:
            raise InvalidInput(
                "task",
                f"room for another model: those of all runs under way have at most {limits.max_models_mib} MiB"
                " (limits.max_models_mib in server.toml)",
                f"{size(used)} in use: stop a run, or raise the limit",
            )
        self._creating[run_id] = min(limits.max_model_mib << 20, left)
        return self._creating[run_id]


def unusable(named: str) -> InvalidInput:
    """The one error for every initial model that the caller cannot use, whatever the reason: it tells of no file."""
    return InvalidInput(
        "initial_model",
        'one that you may use: "run:ID:ROUND" with a run whose models you may export, "upload:DIGEST" with a file that'
        ' you sent (fl run create --initial-model FILE), or "file:NAME" with a file in the models_dir of server.toml',
        repr(named[:100]),
    )
