"""Writes docs/configuration.md from what reads the settings: `python -m docs.source.configuration` makes it anew.

Names, types, ranges and defaults come from the models, a run's meanings from the contract's comments. What stands here
is only what none of them says.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

from pydantic import BaseModel

import algorithms as fl
import fl_client.config as client
import fl_ops.compare.table as comparison
import fl_server.config as server
from docs.source.keys import REQUIRED, ROOT, Row, message_comments, model_rows, sections, shown, signature_rows, table
from fl_ops.settings import DEFAULT_SERVER, ENVIRONMENT
from fl_server.run_config import RunConfig
from tasks.digits import Digits
from tasks.naming import BUILT_IN
from tasks.partition_spec import OPTIONS as HOW_TO_DEAL
from tasks.partition_spec import PartitionSpec
from tasks.vision import Vision

PAGE = ROOT / "docs" / "configuration.md"

_LOG = '"json": one object a line; "pretty": for people; "auto": pretty on a terminal, JSON elsewhere.'
SERVER = {
    "insecure": "Speak plain text, on this machine only; instead of `[tls]`.",
    "log": _LOG,
}
CLIENT = {
    "insecure": "Speak plain text, with a coordinator on this machine; instead of `[tls]`.",
    "log": _LOG,
}
CLIENT_VALUES = {
    "client_id": "text, 1 to 64 of A-Z a-z 0-9 . _ -, the first neither dot nor dash",
    "device": '"auto", "cpu", "cuda" or "cuda:1"',
}
RUN_DEFAULTS = {
    ("RunSpec", "name"): "from task and algorithm",
    ("LocalSpec", "epochs"): "`1`, without `steps`",
    ("RoundSpec", "min_clients"): '`clients_per_round`; `1` with "bernoulli"',
    ("RoundSpec", "quorum"): 'half of `clients_per_round`, rounded up; `1` with "bernoulli"',
}
"""Of keys whose default depends on others, by message and field."""
METHOD = {
    "alpha": "fedcm: share of the local gradient in a step, 1 is FedAvg. feddyn: strength of the proximal term.",
    "beta": (
        "Momentum of the server (fedavgm, slowmo); share of the direction in a step (mimelite, mime), or its weight "
        "(qg); share of the local gradient (mofedsam)."
    ),
    "beta0": "Momentum of the server in the first round; it falls to 0 by the last.",
    "beta1": "Decay of the server's first moment.",
    "beta2": "Decay of the server's second moment.",
    "bias_correction": "Moments divided by what their start at zero takes away.",
    "damp": "Whether gradients have the share 1 - beta.",
    "eps": "Keeps the division by the second moment finite.",
    "eps_inside": "Whether eps stands inside the root.",
    "eta_2": "Rate of the ascent; 0 is FedAvg.",
    "eta_g": "Learning rate of the server.",
    "gamma": "How much of the local momentum is kept from step to step; 0 is FedAvg.",
    "gradient": '"plain"; "sam": at the point of steepest ascent within `rho`, with any method.',
    "lam": "Price of changing the inputs.",
    "momentum_units": '"gradient": the server\'s memory is scaled with the learning rate when that decays.',
    "mu": "fedprox: strength of the proximal term, 0 is FedAvg. qg: how much of the direction the server keeps.",
    "normaliser": '"fednova": each delta is divided by its own number of steps, with any method.',
    "objective": '"uniform": the mean over clients is minimised; "examples": the mean over their examples.',
    "option": "How the client's variate is made: from a pass over its data, or from its delta.",
    "order": '"feddyn_code": clipping and decay behind the mixing, as in the program of FedDyn\'s authors.',
    "rho": "Radius of SAM's ascent; 0 is the plain gradient.",
    "sam_scope": 'What SAM\'s norm is taken over: the "model", or each "tensor".',
    "server_optimizer": (
        "How the server model moves: sgd, momentum, nesterov, slowmo, demon, adagrad, yogi, adam or demon_adam. Its "
        "own parameters are written with `server_` before them: `server_beta`, `server_tau`."
    ),
    "tau": "Keeps the division by the second moment finite; its square is where that starts.",
    "v_from": 'What the second moment is made of: the mean "delta", or the "momentum".',
    "variant": "How the model follows the momentum.",
    "weights": '"examples": by a client\'s number of training examples; "uniform": all alike.',
}
OPTIONS = {
    "data_root": "Folder in torchvision's layout.",
    "download": "Fetch files that are missing.",
    "model": "Which model is trained.",
    "client_eval_fraction": "Part of each shard that is kept from training, for evaluation on the device.",
}
PARTITION = {
    "method": (
        ", ".join(f'"{name}"' for name in HOW_TO_DEAL),
        "How the examples are dealt; [which does what](tasks.md#partitions), and reads which of the keys below.",
    ),
    "clients": ("whole number, 1 or more", "To how many."),
    "seed": ("whole number, 0 or more", "The same seed deals the same."),
    "alpha": ("number, over 0", "Concentration of a Dirichlet: 0.1 gives a client few classes, 100 nearly all alike."),
    "prior_scaled": ("true or false", "`alpha` is shared out among the classes by their frequency."),
    "rotate": ("true or false", "Clients take one example each in turn, instead of being filled one after another."),
    "classes": ("whole number, 1 or more", "How many classes each client draws."),
    "min_examples": ("whole number, 0 or more", "What every client must have."),
    "stratified": ("true or false", "As many of each class for everybody."),
    "sigma": ("number, 0 or more", "Spread of unequal sizes, lognormal; 0 is equal."),
}
FL = {
    "server": (f"host:port, default `{DEFAULT_SERVER}`", "Admin address of the coordinator."),
    "ca": ("path", "Certificate of the authority that signed the coordinator's."),
    "cert": ("path", "Your certificate, an admin's."),
    "key": ("path", "Its private key."),
    "insecure": ("true or false", "Plain text, on this machine only; instead of the three files."),
    "insecure_remote": ("true or false", "Plain text to other machines too, with `insecure`."),
}

_INTRO = """# Configuration

Made by `python -m docs.source.configuration` from the code that reads the files; a test compares.

Every file is TOML.
A key that nobody knows is refused, with the one that was probably meant.
So is a value that does not fit, with what was expected and what came.
Relative paths count from the folder in which a program is started, in `fl.toml` from that file's own folder.
Default "none" means that leaving the key out says something no value says."""

_SERVER = """## The coordinator: server.toml

`fl-server --config server.toml`

`--config` may be given once more, for a file whose keys take the place of those before: a password's file, or what one
place has of its own.

Either `[tls]` is there, or `insecure = true`.
Plain text on an address that others can reach is refused unless `insecure_remote = true` stands beside it.
Where `tls.client_ca` is set, clients and operators need certificates that it signed.
The name in a certificate then decides who its holder is.
Without it, `admin_listen` must be a loopback address."""

_CLIENT = """## A daemon: client.toml

`fl-client --config client.toml`

`--config` may be given once more, for a file whose keys take the place of those before: what all devices share in one,
a device's own part in the other.

Either `[tls]` is there, or `insecure = true` and a `client_id`.
Plain text to a coordinator on another machine wants `insecure_remote = true` as well.
The state directory belongs to one device.
Identity and shard are written there on the first start, and never change."""

_SHARD = """At most one of `partition`, `file` and `folder`; without any, the device trains on all of the task's data.
A partition is made from a seed on each device, by these keys:"""

_RUN = """## A run: the file of `fl run create`

The keys are the fields of `RunSpec` in `protos/fl/v1/admin.proto`, by the same names.
Keys of the top level stand above the first section."""

_METHODS = """The methods, and their parameters with what stands when they are left out.
What one needs beside them stands with it: the run's `population`, a folder on each device where a state is kept, or two
exchanges with the clients in a round."""

_COMPARE = """## A comparison: the table of `fl compare`

The keys of a run without `algorithm` and `seed`, `[simulation]` as in the file of `fl simulate` without `partition` and
`validation_every`, and:"""

_FL = """## The operator's command: fl.toml

`~/.config/impetus/fl.toml`, or `impetus/fl.toml` under `XDG_CONFIG_HOME`.
A flag of the command line comes before the environment, and that before the file.
The strongest of them that speaks of certificates or of plain text decides which of the two it is."""


def page() -> str:
    """The whole page."""
    parts = [_INTRO, _SERVER, *_server(), _CLIENT, *_client(), _RUN, *_run(), _COMPARE, *_compare(), _FL, _fl()]
    return "\n\n".join(parts) + "\n"


def _server() -> list[str]:
    parts = [table(model_rows(server.ServerConfig, SERVER))]
    for name, section in sections(server.ServerConfig).items():
        parts += [_heading(name), table(model_rows(section))]
    return parts


def _client() -> list[str]:
    rows = model_rows(client.ClientConfig, CLIENT)
    parts = [table([replace(row, values=CLIENT_VALUES.get(row.name, row.values)) for row in rows])]
    for name, section in sections(client.ClientConfig).items():
        parts += [_heading(name), table(model_rows(section))]
        if name == "shard":
            parts += [_SHARD, table(_partition_rows())]
    return parts


def _heading(section: str) -> str:
    return f"### [{section}]"


def _partition_rows() -> list[Row]:
    defaults = {name: parameter.default for name, parameter in inspect.signature(PartitionSpec).parameters.items()}
    return [
        Row(name, values, REQUIRED if defaults[name] is inspect.Parameter.empty else shown(defaults[name]), meaning)
        for name, (values, meaning) in PARTITION.items()
    ]


def _run() -> list[str]:
    parts = [table(_run_rows(RunConfig, "RunSpec"))]
    for name, section in sections(RunConfig).items():
        parts += [_heading(name), table(_run_rows(section, f"{name.capitalize()}Spec"))]
        if name == "task":
            parts += _task_options()
        if name == "algorithm":
            parts += _methods()
    return parts


def _run_rows(model: type[BaseModel], message: str) -> list[Row]:
    meanings = _ALGORITHM if message == "AlgorithmSpec" else message_comments(message)
    rows = model_rows(model, {name: meanings[name] for name in model.model_fields})
    return [Row(row.name, row.values, RUN_DEFAULTS.get((message, row.name), row.default), row.meaning) for row in rows]


_ALGORITHM = {"name": "One of the methods below.", "parameters": "Of the method; those left out take its defaults."}


def _methods() -> list[str]:
    algorithms = [fl.build(name) for name in fl.names()]
    used = sorted({parameter for algorithm in algorithms for parameter in algorithm.parameters})
    if unexplained := [parameter for parameter in used if parameter not in METHOD]:
        raise LookupError(f"expected a meaning in METHOD for {', '.join(unexplained)}, found none")
    methods = ["| method | needs | parameters and their defaults |", "| --- | --- | --- |"]
    methods += [_method(algorithm) for algorithm in algorithms]
    meanings = ["| parameter | meaning |", "| --- | --- |"]
    meanings += [f"| `{parameter}` | {METHOD[parameter]} |" for parameter in used]
    return [_METHODS, "\n".join(methods), "\n".join(meanings)]


def _method(algorithm: fl.Algorithm) -> str:
    needs = ["`population`"] if algorithm.needs_population else []
    needs += ["a state on each client"] if algorithm.keeps_client_state else []
    needs += [f"{len(algorithm.exchanges)} exchanges"] if len(algorithm.exchanges) > 1 else []
    parameters = ", ".join(f"`{name} = {shown(value)}`" for name, value in algorithm.parameters.items())
    return f"| `{algorithm.name}` | {', '.join(needs)} | {parameters.replace('= `', '= ').replace('``', '`')} |"


def _task_options() -> list[str]:
    kinds = {name: _class_of(path) for name, path in BUILT_IN.items() if name != "digits"}
    models = "; ".join(f"`{name}`: {', '.join(f'`{model}`' for model in kind.MODELS)}" for name, kind in kinds.items())
    return [
        "Options of the built-in tasks, here and in `[task]` of a daemon. `digits`:",
        table(signature_rows(Digits, OPTIONS)),
        f"The image tasks, with these models: {models}.",
        table(signature_rows(Vision, OPTIONS)),
    ]


def _class_of(path: str) -> type[Vision]:
    module, _, name = path.partition(":")
    kind: type[Vision] = getattr(importlib.import_module(module), name)
    return kind


def _compare() -> list[str]:
    named = {"[[methods]]": comparison.MethodSection, "[tuning]": comparison.TuningSection}
    parts = [table(model_rows(comparison.TableSection))]
    for name, section in {**named, "[report]": comparison.ReportSection}.items():
        parts += [f"### {name}", table(model_rows(section))]
    return parts


def _fl() -> str:
    lines = ["| key | environment | flag | value | meaning |", "| --- | --- | --- | --- | --- |"]
    for key, variable in ENVIRONMENT.items():
        values, meaning = FL[key]
        lines.append(f"| `{key}` | `{variable}` | `--{key.replace('_', '-')}` | {values} | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
