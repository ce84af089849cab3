"""`fl methods`: the methods and the reducers that runs may name on this machine, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from fl_ops.commands import completion
from fl_ops.commands.options import Context, command
from fl_ops.errors import UsageError
from fl_ops.render import output
from fl_ops.render.fitted import FittedTable

if TYPE_CHECKING:
    from algorithms.parameters import Parameters


@command
def methods(
    context: Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A method or a reducer, also as module:attribute: show its parameters.",
            autocompletion=completion.method_names,
        ),
    ] = None,
) -> None:
    """List the methods and reducers of this machine, or the parameters of one.

    Installed packages add theirs by entry points. A coordinator has those of its own machine.
    """
    if name is None:
        rows = _installed()
        output.show({"methods": rows}, lambda: _list(rows), context.as_json)
        return
    facts = _described(name)
    output.show(facts, lambda: _table(facts), context.as_json)


def _installed() -> list[dict[str, str]]:
    # Imported here because it loads torch, which takes seconds and which most other commands do not need.
    from fl_extensions.methods import METHODS, REDUCERS
    from fl_extensions.naming import installed

    rows = []
    for kind in (METHODS, REDUCERS):
        rows += [{"name": name, "kind": kind.noun, "from": "built in"} for name in sorted(kind.built_in)]
        rows += [
            {"name": name, "kind": kind.noun, "from": ", ".join(sorted(paths))}
            for name, paths in installed(kind).items()
        ]
    return rows


def _described(name: str) -> dict[str, Any]:
    """Kind, code and parameters. Raises UsageError for a name that is neither."""
    import algorithms as fl
    from fl_extensions.methods import load_method, load_reducer

    if name in fl.BUILT_IN_REDUCERS:
        return {"name": name, "kind": "reducer", "fingerprint": None, "parameters": []}
    try:
        code = load_method(name)
        kind, parameters = "algorithm", fl.parameters_of(name)
    except fl.AlgorithmError as no_method:
        try:
            code = load_reducer(name)
        except fl.AlgorithmError as no_reducer:
            raise UsageError(f"{no_method} As a reducer: {no_reducer}") from no_method
        kind, parameters = "reducer", fl.reducer_parameters(name)
    shown = None if code is None else {"version": code.version, "source": code.source}
    return {"name": name, "kind": kind, "fingerprint": shown, "parameters": _rows(parameters)}


def _rows(parameters: Parameters) -> list[dict[str, Any]]:
    from algorithms.parameters import described

    return [
        {"name": name, "values": described(it.kind), "default": it.default, "schedule": it.per_round}
        for name, it in parameters.items()
    ]


def _list(rows: list[dict[str, str]]) -> RenderableType:
    table = FittedTable(("Name", "Kind", "From"), wraps=("From",))
    for row in rows:
        table.add_row(row["name"], row["kind"], row["from"])
    return table


def _table(facts: Mapping[str, Any]) -> RenderableType:
    table = FittedTable(("Parameter", "Values", "Default", "Schedule"), wraps=("Values",))
    for row in facts["parameters"]:
        default = "" if row["default"] is None else str(row["default"])
        table.add_row(row["name"], row["values"], default, "yes" if row["schedule"] else "")
    code = facts["fingerprint"]
    source = "built in" if code is None else f"version {code['version']!r} {code['source']}"
    return Group(Text(f"{facts['kind']} {facts['name']}, {source}"), table)
