"""Writes docs/configuration.md from the settings models: `python -m docs.source.configuration`.

Names, types, ranges and defaults come from the models, the meanings of a run's keys from the comments of the contract.
`docs.source.configuration_texts` has the text that neither of them has.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace

from pydantic import BaseModel

import algorithms as fl
import fl_client.policy.config as policy
import fl_client.settings.config as client
import fl_ops.compare.table as comparison
import fl_server.settings.config as server
from algorithms.parameters import Parameters
from docs.source import configuration_texts as texts
from docs.source.keys import REQUIRED, ROOT, Row, message_comments, model_rows, sections, shown, signature_rows, table
from fl_ops.admin.settings import ENVIRONMENT
from fl_server.run_settings.config import RunConfig, ScheduleSection
from fl_tasks.built_in.digits import Digits
from fl_tasks.built_in.leaf import Leaf
from fl_tasks.built_in.vision import Vision
from fl_tasks.naming import BUILT_IN
from fl_tasks.partitioning.spec import PartitionSpec

PAGE = ROOT / "docs/configuration.md"


def page() -> str:
    """The whole page."""
    parts = [
        texts.INTRO,
        texts.SERVER_INTRO,
        *_server(),
        texts.CLIENT_INTRO,
        *_client(),
        texts.POLICY_INTRO,
        *_policy(),
        texts.RUN_INTRO,
        *_run(),
    ]
    parts += [texts.COMPARE_INTRO, *_compare(), texts.FL_INTRO, _fl()]
    return "\n\n".join(parts) + "\n"


def _server() -> list[str]:
    parts = [table(model_rows(server.ServerConfig, texts.SERVER))]
    for name, section in sections(server.ServerConfig).items():
        parts += [_heading(name), table(model_rows(section))]
    return parts


def _client() -> list[str]:
    rows = model_rows(client.ClientConfig, texts.CLIENT)
    parts = [table([replace(row, values=texts.CLIENT_VALUES.get(row.name, row.values)) for row in rows])]
    for name, section in sections(client.ClientConfig).items():
        parts += [_heading(name, repeated=name == "tasks"), table(model_rows(section))]
        if name == "shard":
            parts += [texts.SHARD_INTRO, table(_partition_rows())]
    return parts


def _policy() -> list[str]:
    parts = [table(model_rows(policy.Policy))]
    for name, section in sections(policy.Policy).items():
        parts += [_heading(name), table(model_rows(section))]
    return parts


def _heading(section: str, *, repeated: bool = False) -> str:
    return f"### [[{section}]]" if repeated else f"### [{section}]"


def _partition_rows() -> list[Row]:
    defaults = {name: parameter.default for name, parameter in inspect.signature(PartitionSpec).parameters.items()}
    return [
        Row(name, values, REQUIRED if defaults[name] is inspect.Parameter.empty else shown(defaults[name]), meaning)
        for name, (values, meaning) in texts.PARTITION.items()
    ]


def _run() -> list[str]:
    parts = [table(_run_rows(RunConfig, "RunSpec"))]
    for name, section in sections(RunConfig).items():
        parts += [_heading(name), table(_run_rows(section, f"{name.title().replace('_', '')}Spec"))]
        if name == "task":
            parts += _task_options()
        if name == "algorithm":
            parts += _methods()
    return parts


def _run_rows(model: type[BaseModel], message: str) -> list[Row]:
    meanings = _ALGORITHM if message == "AlgorithmSpec" else message_comments(message)
    rows = model_rows(model, {name: meanings[name] for name in model.model_fields})
    return [
        Row(row.name, row.values, texts.RUN_DEFAULTS.get((message, row.name), row.default), row.meaning) for row in rows
    ]


_ALGORITHM = {
    "name": "One of the methods below, or one from outside (own-methods.md).",
    "parameters": "Of the method; those left out take its defaults.",
    "schedules": "Parameters that change from round to round: a table `[algorithm.schedules.NAME]` for each.",
    "fingerprint": "Of a method from outside: `version` and `source` of its code. The coordinator sets it; a run that"
    " names other code is refused.",
}


def _methods() -> list[str]:
    algorithms = [fl.build(name) for name in fl.names()]
    used = sorted({parameter for name in fl.names() for parameter in fl.parameters_of(name)})
    if unexplained := [parameter for parameter in used if parameter not in texts.METHOD]:
        raise LookupError(f"expected a meaning in METHOD for {', '.join(unexplained)}, found none")
    usual = _usual(algorithms)
    methods = [_method(algorithm, usual) for algorithm in algorithms]
    meanings = [f"- `{parameter}`: {texts.METHOD[parameter]}" for parameter in used]
    shared = [f"- `{name} = {default}`: {_these(having)}" for (name, default), having in usual.items()]
    return [
        texts.METHODS_INTRO,
        "\n".join(shared).replace("= `", "= ").replace("``", "`"),
        "The methods:",
        "\n".join(methods),
        "The parameters:",
        "\n".join(meanings),
        *_schedules(),
    ]


def _schedules() -> list[str]:
    meanings = message_comments("ParameterSchedule", "training")
    changing: dict[str, list[str]] = {}
    for name in fl.names():
        for parameter, declaration in _with_sam(name).items():
            if declaration.per_round:
                changing.setdefault(parameter, []).append(f"`{name}`")
    lines = [f"- `{parameter}` of {_these(methods)}" for parameter, methods in sorted(changing.items())]
    heading = "### [algorithm.schedules.NAME]"
    return [heading, f"{texts.SCHEDULES_INTRO}\n\n" + "\n".join(lines), table(model_rows(ScheduleSection, meanings))]


def _these(methods: list[str]) -> str:
    without = [f"`{name}`" for name in fl.names() if f"`{name}`" not in methods]
    if len(without) > len(methods):
        return ", ".join(methods)
    return f"every method except {', '.join(without)}" if without else "every method"


def _with_sam(method: str) -> Parameters:
    """The method's parameters, with those of SAM if the two go together."""
    if "gradient" not in fl.parameters_of(method):
        return fl.parameters_of(method)
    try:
        fl.build(method, gradient="sam")
    except fl.AlgorithmError:
        return fl.parameters_of(method)
    return fl.parameters_of(method, gradient="sam")


def _usual(algorithms: list[fl.Algorithm]) -> dict[tuple[str, str], list[str]]:
    """(parameter, default) that most methods have -> these methods. Their rows leave it out."""
    having: dict[tuple[str, str], list[str]] = {}
    for algorithm in algorithms:
        for name in fl.parameters_of(algorithm.name):
            having.setdefault((name, shown(algorithm.parameters.get(name))), []).append(f"`{algorithm.name}`")
    return {pair: names for pair, names in having.items() if 3 * len(names) > 2 * len(algorithms)}


def _method(algorithm: fl.Algorithm, usual: Collection[tuple[str, str]]) -> str:
    needs = ["`population`"] if algorithm.needs_population else []
    needs += ["all clients in every round"] if algorithm.skipping else []
    needs += ["a state on each client"] if algorithm.keeps_client_state else []
    needs += [f"{len(algorithm.exchanges)} exchanges"] if len(algorithm.exchanges) > 1 else []
    declared = fl.parameters_of(algorithm.name)
    values = {name: shown(algorithm.parameters.get(name)) for name in declared}
    parameters = ", ".join(f"`{name} = {value}`" for name, value in values.items() if (name, value) not in usual)
    told = [*([f"needs {', '.join(needs)}"] if needs else []), *([parameters] if parameters else [])]
    text = "; ".join(told).replace("= `", "= ").replace("``", "`")
    return f"- `{algorithm.name}`" + (f": {text}" if text else "")


def _task_options() -> list[str]:
    kinds = {name: _class_of(path) for name, path in BUILT_IN.items()}
    return [
        "Options of the built-in tasks, here and in `[task]` of a daemon. `digits`:",
        table(signature_rows(Digits, texts.OPTIONS)),
        f"The image tasks, with these models: {_models(kinds, Vision)}.",
        table(signature_rows(Vision, texts.OPTIONS)),
        f"LEAF's image tasks, with these models: {_models(kinds, Leaf)}.",
        table(signature_rows(Leaf, texts.LEAF_OPTIONS)),
    ]


def _models(kinds: Mapping[str, type], family: type[Vision | Leaf]) -> str:
    named = {name: kind.MODELS for name, kind in kinds.items() if issubclass(kind, family)}
    return "; ".join(f"`{name}`: {', '.join(f'`{model}`' for model in models)}" for name, models in named.items())


def _class_of(path: str) -> type:
    module, _, name = path.partition(":")
    kind: type = getattr(importlib.import_module(module), name)
    return kind


def _compare() -> list[str]:
    named: dict[str, type[BaseModel]] = {"[[methods]]": comparison.MethodSection, "[tuning]": comparison.TuningSection}
    parts = [table(model_rows(comparison.TableSection))]
    named["[report]"] = comparison.ReportSection
    for name, section in named.items():
        parts += [f"### {name}", table(model_rows(section))]
    return parts


def _fl() -> str:
    lines = []
    for key, (values, meaning) in texts.FL.items():
        option = f"--{key.replace('_', '-')}"
        lines.append(f"- `{key}`, `{ENVIRONMENT[key]}`, `{option}` ({values}): {meaning}")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
