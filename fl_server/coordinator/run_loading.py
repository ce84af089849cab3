"""Loads the code that runs name, and builds runs with it. Code from outside gets limits of time."""

from __future__ import annotations

from functools import partial

from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import build_algorithm
from fl_server.aggregation.outside import outside_names
from fl_server.coordinator.method_loading import load_code
from fl_server.coordinator.task_loading import LoadedTask, load_allowed
from fl_server.outside_calls import OutsideCode
from fl_server.run_config import RunConfig
from fl_server.runs.context import RunDependencies
from fl_server.runs.evaluation.criterion import directions_of
from fl_server.runs.run import Run
from fl_server.services import Services
from fl_server.store.records import RunRecord


class RunLoading:
    """For runs that are created, restored or continued. Lives on the event loop."""

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

    async def build(self, record: RunRecord, config: RunConfig, task: LoadedTask, most: int) -> Run:
        """A run whose models are not loaded. most: bytes of its model. Raises InvalidInput, AlgorithmError."""
        code = OutsideCode(record.run_id, outside_names(config))
        algorithm = await self._services.in_code(code, build_algorithm, config)
        directions = directions_of(config, task.directions)
        start = self._services.checkpoints.start(record.run_id)
        dependencies = RunDependencies(
            task.fingerprint,
            algorithm,
            lambda current: Engine(current, task.task, max_model_bytes=most, start=start),
            directions,
            task.task,
        )
        return Run(self._services, record, config, dependencies)
