"""Where each command of `fl` is: its module, which is imported when the command is called, and its line in the help."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import typer

from fl_common.command_help import examples


class Place(NamedTuple):
    """Where a command is. help: the first sentence of its own help, for the list of all commands."""

    module: str
    """Below `fl_ops.commands`."""
    help: str
    examples: tuple[str, ...] = ()
    """For a function: command lines at the end of its help."""
    name: str = ""
    """A function, or the `typer.Typer` of a group. Empty: a function with the name of its module."""

    def load(self, command: str) -> Any:
        """Import it and build its command line."""
        name = self.name or self.module.rpartition(".")[2]
        found = getattr(import_module(f"fl_ops.commands.{self.module}"), name)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(command, **examples(*self.examples))(found)
            return typer.main.get_command(single)
        return typer.main.get_group(found)


COMMANDS = {
    "run": Place("coordinator.runs", "Create, watch and control training runs.", name="app"),
    "clients": Place("coordinator.clients", "List clients and control which of them take part.", name="app"),
    "top": Place(
        "coordinator.top", "Show runs, clients and what waits, on the whole terminal, with every change.", ("fl top",)
    ),
    "web": Place(
        "coordinator.web",
        "Show runs and clients in a browser, live and read only, until Ctrl-C.",
        ("fl web", "fl web --listen 127.0.0.1:8000", "fl web open --server coordinator.example:7071"),
    ),
    "export": Place(
        "coordinator.export",
        "Download a run's model as a file. It appears complete and verified, or not at all.",
        (
            "fl export digits-1 --round best --out best.safetensors",
            "fl export tuned --format adapter --config run.toml --out adapter",
        ),
    ),
    "release": Place(
        "coordinator.releases", "Release a run's model to devices, signed, in stages, with a way back.", name="app"
    ),
    "packages": Place("coordinator.packages", "Packages of task code: signed wheels that devices may run.", name="app"),
    "demo": Place(
        "local.demo",
        "Compare FedCM and FedAvg on this machine, with a coordinator and daemons as processes and non-IID data.",
        ("fl demo", "fl demo --rounds 10 --algorithm fedavg --algorithm scaffold"),
    ),
    "new": Place(
        "local.new",
        "Make a package with a task, in a new folder: model, data reader, a shard for each of two sites, tests, a run.",
        ("fl new my_task --template tabular",),
    ),
    "simulate": Place(
        "local.simulate",
        "Simulate a run on this machine, without a coordinator.",
        (
            "fl simulate config.toml --seeds 0,1,2 --processes 3 --out results",
            "fl simulate config.toml --replay digits-1 --state-dir /var/lib/impetus-server",
        ),
    ),
    "enroll": Place("access.enrollment", "Make tokens with which devices get their first certificate.", name="app"),
    "compare": Place(
        "local.compare",
        "Compare methods: tune each in the same way, run the best setting on new seeds, report the spread.",
        ("fl compare table.toml --processes 4", "fl compare table.toml --no-run"),
    ),
    "landscape": Place(
        "local.landscape",
        "Show how flat saved models are: the loss along random directions, largest eigenvalue and trace of the "
        "Hessian.",
        (
            "fl landscape results/seed-0 config.toml --out flatness",
            "fl landscape fedavg.safetensors fedsam.safetensors config.toml --two --out flatness",
        ),
    ),
    "methods": Place(
        "local.methods",
        "List the methods and reducers of this machine, or the parameters of one.",
        ("fl methods", "fl methods fedcm", "fl methods my_methods:sign_momentum --json"),
    ),
    "partition": Place(
        "local.partition",
        "Partition a task's training data among clients. Client i then uses the file with index i.",
        ("fl partition digits --clients 8 --out parts.json --alpha 0.1",),
    ),
    "privacy": Place(
        "local.privacy",
        "State what a run's rounds cost its privacy account, and the least noise for its budget.",
        ("fl privacy run.toml",),
    ),
    "track": Place(
        "coordinator.tracking",
        "Write a run's rounds for TensorBoard or MLflow until the run ends, from its first round on.",
        ("fl track digits-1 --tensorboard runs", "fl track digits-1 --mlflow http://127.0.0.1:5000 --once"),
        name="track",
    ),
    "whoami": Place("access.whoami", "Show your identity, your roles and the calls that they allow.", ("fl whoami",)),
    "version": Place(
        "local.version",
        "Show the versions of this command, of the protocol and of Python.",
        ("fl version --json",),
        name="show_version",
    ),
    "task": Place("local.task", "Check tasks before a run uses them.", name="app"),
    "certificates": Place("access.enrollment", "List the certificates of devices.", name="certificates_app"),
    "ca": Place("access.ca", "Make certificates for a site that has no authority of its own.", name="app"),
    "audit": Place("access.audit", "List, export and verify the audit log.", name="app"),
}
"""The commands of `fl`, in the order of their help: what an operator needs every day comes first."""
