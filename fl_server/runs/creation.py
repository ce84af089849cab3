"""Creates runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, nullcontext
from io import FileIO

import structlog

from algorithms import AlgorithmError
from fl_common.allocator import free_what_failed
from fl_common.units import size
from fl_server.aggregation.methods import complete, outside_names
from fl_server.errors import InvalidInput, RunExists
from fl_server.outside_calls import OutsideCode
from fl_server.run.evaluation_metrics import check_metric, directions_of, needs_metric, with_direction
from fl_server.run.run import Run
from fl_server.run.secure_stages import trust_of
from fl_server.run_settings.config import RunConfig
from fl_server.runs.deletion import Deletions
from fl_server.runs.loading import LoadedTask, RunLoading, not_loadable
from fl_server.runs.table import Audit, RunTable
from fl_server.services import Services
from fl_server.store.records import HistoryRecord, RunRecord
from fl_tasks import TaskError
from protos.digests import digest_text

log = structlog.get_logger()


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
        return await asyncio.shield(create())

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
        for client_id in self._services.fleet.attendance.present():
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
