"""The text of docs/configuration.md that neither the settings models nor the contract have."""

from __future__ import annotations

from fl_ops.admin.settings import DEFAULT_SERVER
from fl_tasks.partitioning.spec import OPTIONS as HOW_TO_DEAL

_LOG = '"json": one object a line; "pretty": for people; "auto": pretty on a terminal, JSON elsewhere.'
SERVER = {
    "insecure": "Use plain text, on this machine only; in place of `[tls]`.",
    "log": _LOG,
}
CLIENT = {
    "insecure": "Use plain text, with a coordinator on this machine; in place of `[tls]`.",
    "log": _LOG,
}
CLIENT_VALUES = {
    "client_id": "text, 1 to 64 of A-Z a-z 0-9 . _ -, the first neither dot nor dash",
    "device": '"auto", "cpu", "cuda" or "cuda:1"',
}
RUN_DEFAULTS = {
    ("RunSpec", "name"): "from task and algorithm",
    ("LocalSpec", "epochs"): "`1`, without `steps`",
    ("RoundSpec", "min_clients"): '`clients_per_round`; `min_accepted` with "bernoulli", `goal` with "buffer"',
    ("RoundSpec", "quorum"): 'half of `clients_per_round`, or with "bernoulli" of the cohort, rounded up',
    ("RoundSpec", "min_accepted"): "`1`, or the coordinator's `rounds.min_accepted`",
}
"""Defaults that depend on other keys, by message and field."""
METHOD = {
    "alpha": "fedcm: share of the local gradient in a step, 1 is FedAvg. feddyn: strength of the proximal term.",
    "beta": (
        "Momentum of the server (fedavgm, slowmo, diloco); share of the direction in a step (mimelite, mime), or its "
        "weight (qg); share of the local gradient (mofedsam)."
    ),
    "beta0": "Momentum of the server in the first round; it falls to 0 by the last.",
    "beta1": "Decay of the server's first moment.",
    "beta2": "Decay of the server's second moment.",
    "bias_correction": "Whether the moments are corrected for their start at zero.",
    "damp": "Whether gradients have the share 1 - beta.",
    "eps": "Keeps the division by the second moment finite.",
    "eps_inside": "Whether eps is inside the root.",
    "eta_2": "Rate of the ascent; 0 is FedAvg.",
    "eta_g": "Learning rate of the server.",
    "gamma": "Share of the local momentum that is kept from step to step; 0 is FedAvg.",
    "gradient": '"plain"; "sam": at the point of steepest ascent within `rho`, with any method.',
    "L": (
        'Form of the map of the inputs: "diagonal", one factor for each channel; "matrix" over a whole input, d x d '
        'numbers for an input of d; "channel_matrix", a matrix over the channels.'
    ),
    "lam": "Penalty for a change of the inputs.",
    "momentum_units": '"gradient": the server\'s memory is scaled with the learning rate when that decays.',
    "mu": "fedprox: strength of the proximal term, 0 is FedAvg. qg: share of the direction that the server keeps.",
    "normaliser": '"fednova": each delta is divided by its own number of steps, with any method.',
    "objective": '"uniform": the mean over clients is minimised; "examples": the mean over their examples.',
    "option": "Source of the client's variate: I, a pass over its data, or II, its delta.",
    "order": '"feddyn_code": clipping and decay after the mixing, as in the program of FedDyn\'s authors. '
    "Weight decay is then 1/alpha times as strong with fedcm and 1/beta times with mofedsam as with others.",
    "p": (
        "Probability that the clients communicate after a local step: each round has a drawn number of steps, 1/p in "
        "the mean, and `local.steps` and `local.epochs` are left out."
    ),
    "rho": "Radius of SAM's ascent; 0 is the plain gradient.",
    "sam_p": "Order p of SAM's norm, over 1: with a large one all entries of the ascent have almost the same size.",
    "sam_scope": 'Scope of SAM\'s norm: the "model", or each "tensor".',
    "server_optimizer": (
        "Optimizer of the server model: sgd, momentum, nesterov, slowmo, demon, adagrad, yogi, adam or demon_adam. Its "
        "own parameters have the prefix `server_`: `server_beta`, `server_tau`."
    ),
    "tau": "Keeps the division by the second moment finite.",
    "v0": "Second moment at the start; none: the square of `tau`, and 0 with `bias_correction`.",
    "v_from": 'Source of the second moment: the mean "delta", or the "momentum".',
    "variant": "Form of the momentum step.",
    "weights": '"examples": by a client\'s number of training examples; "uniform": equal weights.',
}
OPTIONS = {
    "data_root": "Folder in torchvision's layout.",
    "download": "Download missing files.",
    "model": "The trained model.",
    "client_eval_fraction": "Part of each shard that is held out from training, for evaluation on the device.",
    "client_eval_seed": "Draws that part at random, by this seed and the images of the shard. None: evenly spaced.",
    "augment": "Whether training images are mirrored and cropped at random (CIFAR).",
    "pooled": "The training set has the test images behind its own; clients evaluate, with `client_eval_fraction`.",
    "share": "Share of the training set that is used: the first floor(share * M) images of a random order.",
    "share_seed": "Draws that order.",
}
LEAF_OPTIONS = {
    **OPTIONS,
    "data_root": "LEAF's folder `data`, or the folder of the data set in it.",
    "users": "Train on so many of the users only; 0 for all.",
    "users_seed": "Draws these users.",
    "user": "The only user of this device, by the name in LEAF's files; empty for all.",
}
PARTITION = {
    "method": (
        ", ".join(f'"{name}"' for name in HOW_TO_DEAL),
        (
            "Method of the partition; [partitions](training/tasks.md#partitions) describes each, "
            "with the keys below that it reads."
        ),
    ),
    "clients": ("integer ≥ 0", 'Number of clients. 0, for "natural" only: one for each group.'),
    "seed": ("integer ≥ 0", "The same seed gives the same partition."),
    "alpha": (
        "number > 0",
        "Concentration of a Dirichlet: 0.1 gives a client few classes, 100 almost equal shares.",
    ),
    "prior_scaled": ("boolean", "Whether `alpha` is divided among the classes by their frequency."),
    "rotate": ("boolean", "Clients take one example each in turn, instead of being filled one after another."),
    "classes": ("integer ≥ 1", "Number of classes that each client draws."),
    "min_examples": ("integer ≥ 0", "Fewest examples of a client."),
    "stratified": ("boolean", "Each client gets the same number of each class."),
    "sigma": ("number ≥ 0", "Spread of the sizes, lognormal; 0 gives equal sizes."),
}
FL = {
    "server": (f"host:port, default `{DEFAULT_SERVER}`", "Admin address of the coordinator."),
    "ca": ("path", "Certificate of the authority that signed the coordinator's."),
    "cert": ("path", "Your certificate."),
    "key": ("path", "Its private key."),
    "token_file": (
        "path",
        (
            "A file with a token (OIDC), in place of `cert` and `key`; it is read before each call. `server` is then "
            "the coordinator's `token_listen`."
        ),
    ),
    "insecure": ("boolean", "Plain text, on this machine only; in place of the files."),
    "insecure_remote": ("boolean", "Plain text to other machines too, with `insecure`."),
    "proxy": (
        '`"none"`, `"environment"` or a URL `http://HOST:PORT`, default `"environment"`',
        (
            "The HTTP proxy of the connection. `environment`: that of the variable `grpc_proxy`, `https_proxy` or "
            "`http_proxy`, the first that is set, except to the hosts of `no_proxy`. A coordinator on this machine "
            "never has one."
        ),
    ),
}

INTRO = """# Configuration

`python -m docs.source.configuration` generates this page from the code that reads the files; a test compares them.

Every file is TOML in UTF-8, with or without a byte order mark. An unknown key is refused, with a suggestion; a wrong
value with what was expected and what came. A value has exactly the type that is named: `"yes"` is not `true`,
`2.0` is no integer.
Relative paths start at the folder in which a program is started, in `fl.toml` at that file's own folder.
Without a default a missing key has a meaning that no value has. Numbers of a run have the limits of the
wire's types: integers 4,294,967,295, norms and rates 3e38."""

SERVER_INTRO = """## The coordinator: server.toml

`fl-server --config server.toml`

A second `--config` names a file with keys that replace those of the first: a password, or the settings of one site.

The file has either `[tls]` or `insecure = true`; plain text on an address that others can reach needs
`insecure_remote = true` in addition. With `tls.client_ca`, clients and operators need certificates that it signed,
whose name identifies the holder. Without it, the coordinator starts only with `tls.no_client_certificates = true` and
`admin_listen` on loopback."""

CLIENT_INTRO = """## A daemon: client.toml

`fl-client --config client.toml`

A second `--config` names a file with keys that replace those of the first: the settings of one device.

The file has either `[tls]`, or `insecure = true` and a `client_id`; plain text to another machine needs
`insecure_remote = true` in addition. The state directory belongs to one device: identity and shard are written there on
the first start and never change."""

SHARD_INTRO = """At most one of `partition`, `file`, `indices`, `folder` and `query`; without any of them, all data.
[Data](training/data.md#which-examples-a-device-has) describes them.
Each device computes the partition from a seed, by these keys:"""

POLICY_INTRO = """## The site's policy: policy.toml

The file that `policy` of client.toml names. [policy.md](devices/policy.md) explains it.
A key that is absent allows everything; an empty list allows nothing. `-` means no limit."""

RUN_INTRO = """## A run: the file of `fl run create`

The keys are the fields of `RunSpec` in `protos/fl/v1/admin.proto`, with the same names.
Top-level keys must be above the first section."""

METHODS_INTRO = """The methods, what each needs of a run and its clients, and the parameters with their defaults. Most
have these, too:"""

SCHEDULES_INTRO = """How the parameter NAME changes from round to round; each round's clients get its value.
`parameters` has the value of round 0.
A schedule can change:"""

COMPARE_INTRO = """## A comparison: the table of `fl compare`

The file has the keys of a run without `algorithm` and `seed`, `[simulation]` as in the file of `fl simulate` without
`partition` and `validation_every`, and:"""

FL_INTRO = """## The operator's command: fl.toml

`~/.config/impetus/fl.toml`, or `impetus/fl.toml` under `XDG_CONFIG_HOME`.
A command-line flag has priority over the environment, and the environment over the file.
The source with the highest priority that sets a certificate, a token or plain text decides between them.

`FL_TOKEN` has a token itself, in place of `FL_TOKEN_FILE`. There is no option and no key for it: other users of a
machine can see a command line, and a settings file is not for secrets.

`FL_TLS_MIN_VERSION=1.2` allows TLS 1.2, for a proxy in front of the coordinator that has no newer version.
Otherwise TLS 1.3 is required."""
