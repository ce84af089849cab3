"""The schedules of a run's parameters as text."""

from __future__ import annotations

from protos.fl.v1 import admin_pb2
from protos.fl.v1.training_pb2 import ParameterSchedule


def schedules_text(spec: admin_pb2.RunSpec) -> str:
    """Each parameter that changes from round to round, with its values; empty without one."""
    schedules, parameters = spec.algorithm.schedules, spec.algorithm.parameters.fields
    return "; ".join(
        f"{name}: {_rule(schedules[name], parameters[name].number_value, spec.planned_rounds)}"
        for name in sorted(schedules)
        if name in parameters
    )


def _rule(schedule: ParameterSchedule, start: float, rounds: int) -> str:
    match schedule.kind:
        case "linear" | "cosine":
            return f"{start:g} in round 0 to {schedule.end:g} in round {max(0, rounds - 1)}, {schedule.kind}"
        case "step":
            milestones = ", ".join(map(str, schedule.milestones))
            return f"{start:g}, times {schedule.factor:g} in round{'s'[: len(schedule.milestones) > 1]} {milestones}"
        case _:
            return f"{start:g} in every round"
