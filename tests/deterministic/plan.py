"""A life by its seed: the run that is trained, and the faults that meet it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SERVER = "server"
HEAL_S = 90.0
"""No fault begins after this virtual time, and none lasts longer than `LONGEST_S`, but for `LONG_DOWN_S`."""
LONGEST_S = 40.0
LONG_DOWN_S = 3600.0
"""A coordinator may be down for an hour. Then there are no more faults."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Which fields it uses depends on its kind."""

    kind: str
    who: str = SERVER
    at: float = 0.0
    """Virtual seconds after which it may happen."""
    name: str = ""
    """Of an effect or of a method."""
    number: int = 0
    """Of the effect after `at`, or of the client's call of the method."""
    how: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in ("who", "at", "name", "number", "how", "seconds")}
        return f"{self.kind}({', '.join(f'{key}={value}' for key, value in values.items() if value)})"


@dataclass(frozen=True, slots=True)
class Job:
    """The run of a life."""

    name: str
    sections: Mapping[str, Any]
    exchanges: int = 1
    cohort: bool = True
    """Whether the whole cohort closes a round, so that faults that take nothing away change no bit."""

    @property
    def stage_s(self) -> float:
        """Time of a stage of secure aggregation; 0 without it."""
        seconds: float = self.sections.get("secure_aggregation", {}).get("stage_s", 0.0)
        return seconds

    @property
    def unit(self) -> str:
        """Of privacy: "client", "record", or empty without it."""
        unit: str = self.sections.get("privacy", {}).get("unit", "")
        return unit

    @property
    def max_staleness(self) -> int | None:
        """Of a run with a buffer; None for another one."""
        most: int | None = self.sections["round"].get("max_staleness")
        return most


@dataclass(frozen=True, slots=True)
class Plan:
    """A life: everything is a function of the seed."""

    seed: int
    job: Job
    clients: tuple[str, ...]
    faults: tuple[Fault, ...] = field(default=())
    objects: bool = False
    """Whether the coordinator's files are in an object store."""


BASE: dict[str, Any] = {"name": "r", "local": {"steps": 2, "batch_size": 8}, "stop": {"rounds": 3}, "seed": 7}
ACCOUNT = "all"
"""The privacy account of all private lives."""
PRIVACY = {
    "unit": "client", "noise_multiplier": 1.0, "clip": 0.5, "delta": 0.01, "max_epsilon": 1000.0, "clip_quantile": 0.6,
    "account": ACCOUNT,
}  # fmt: skip
PRIVATE = Job(
    "privacy of clients",
    {
        **BASE, "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.3}}, "population": 8, "privacy": PRIVACY,
        "round": {"sampling": "bernoulli", "rate": 0.5, "deadline_s": 60.0},
    },
)  # fmt: skip
PRIVATE_SEEDS, PRIVATE_OF = (3, 4, 5), 16
"""The seeds with these remainders have privacy of clients in place of what is drawn for them."""
RECORD_PRIVACY: dict[str, Any] = {"unit": "record", "noise_multiplier": 1.5, "clip": 0.5, "delta": 1e-5}
RECORDS = Job(
    "privacy of records",
    {
        **BASE, "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.3, "weights": "uniform"}},
        "round": {"clients_per_round": 3, "quorum": 1, "deadline_s": 60.0}, "privacy": RECORD_PRIVACY,
    },
)  # fmt: skip
RECORD_SEEDS = (6, 11)
"""The same for privacy of records, by `PRIVATE_OF`."""


def jobs() -> list[Job]:
    """All other kinds of runs."""
    round_ = {"clients_per_round": 3, "quorum": 1, "deadline_s": 60.0}

    def job(name: str, algorithm: str, *, round_: Mapping[str, Any] = round_, **more: Any) -> Job:
        kept = {key: more.pop(key) for key in ("exchanges", "cohort") if key in more}
        parameters = more.pop("parameters", {})
        sections = {**BASE, "algorithm": {"name": algorithm, "parameters": parameters}, "round": round_, **more}
        return Job(name, sections, **kept)

    return [
        job("fedcm", "fedcm", parameters={"alpha": 0.3}),
        job("scaffold", "scaffold", population=8),
        job("mime", "mime", exchanges=2),
        job("first arrivals", "fedcm", cohort=False, round_={**round_, "clients_per_round": 2, "close": "goal",
                                                             "over_selection": 1.5}),
        job("clients evaluate", "fedavg", evaluation={"clients_every": 1}),
    ]  # fmt: skip


def secure_job() -> Job:
    """A run with secure aggregation."""
    [plain] = [job for job in jobs() if job.name == "clients evaluate"]
    sections = {
        **plain.sections, "round": {"clients_per_round": 4, "quorum": 3, "deadline_s": 60.0},
        "algorithm": {"name": "fedavg", "parameters": {"weights": "uniform"}},
        "secure_aggregation": {"clip": 0.5, "max_dropped": 0.25, "stage_s": 20.0},
    }  # fmt: skip
    return Job("secure aggregation", sections)


SECURE_EVERY = 5
"""One of so many lives has secure aggregation."""


BUFFERED = frozenset({4, 5})
"""Lives whose seeds have these rests by 11 have a run with a buffer."""


def buffered_job() -> Job:
    """The run of these lives."""
    round_ = {"close": "buffer", "goal": 2, "concurrency": 3, "max_staleness": 3, "deadline_s": 60.0}
    sections = {**jobs()[0].sections, "round": round_, "stop": {"rounds": 5}}
    return Job("buffer", sections, cohort=False)


STORED_SEEDS, STORED_OF = (5, 12), 13
"""The seeds with these remainders have the coordinator's files in an object store, unless their run is private."""


def _of_the_store(seed: int, faults: list[Fault]) -> list[Fault]:
    """Kills at requests, faults of the store, and the loss of the coordinator's own disk, beside the others."""
    draw = random.Random(f"objects {seed}")

    def fault(kind: str) -> Fault:
        at, short = round(draw.uniform(0.0, 30.0), 3), round(draw.choice((0.5, 3.0, 15.0)) * draw.uniform(0.5, 1.0), 3)
        number, name = int(draw.choice((2, 8)) * draw.random()), draw.choice(_REQUESTS)
        if kind == "kill":
            how = draw.choice(("before", "after", "late", "late"))
            return Fault("kill", SERVER, at, name, number, how, short)
        how = draw.choice(("away", "unanswered", "busy")) if kind == "store" else ""
        return Fault(kind, SERVER, at, number=number, how=how, seconds=short)

    kinds = ("kill", "kill", "store", "store", "slow", "disk")
    return [*faults, *(fault(draw.choice(kinds)) for _ in range(draw.choice((1, 2, 4))))]


_REQUESTS = ("store:put", "store:put", "store:delete", "store:get")
_CALLS = ("Register", "Attend", "FetchModel", "SubmitUpdate", "SubmitUpdate", "SubmitUpdate", "QueryUpload",
          "ReportStatus")  # fmt: skip
_SERVER_EFFECTS = ("ledger:commit", "file:rename", "file:replace", "file:pwrite", "file:save", "file:fsync",
                   "file:unlink", "file:write", "file:mkdir", "file:open")  # fmt: skip
_CLIENT_EFFECTS = ("file:replace", "file:write", "file:unlink", "file:fsync", "file:open")


def plan_of(seed: int) -> Plan:
    """The life of a seed."""
    draw = random.Random(f"plan {seed}")
    job = draw.choice(jobs())
    if seed % PRIVATE_OF in PRIVATE_SEEDS:
        job = PRIVATE
    elif seed % PRIVATE_OF in RECORD_SEEDS:
        job = RECORDS
    elif seed % SECURE_EVERY == 1:
        job = secure_job()
    elif seed % 11 in BUFFERED:
        job = buffered_job()
    clients = tuple(f"c-{number}" for number in range(draw.choice((4, 4, 5, 6, 8))))
    count = draw.choice((1, 2, 3, 4, 6, 10))
    faults = [_fault(draw, clients) for _ in range(count)]
    stored = seed % STORED_OF in STORED_SEEDS and not job.unit
    if stored:
        faults = _of_the_store(seed, faults)
    return Plan(seed, job, clients, tuple(map(_of_answers, faults) if job.stage_s else faults), stored)


def _of_answers(fault: Fault) -> Fault:
    """With secure aggregation a half of the calls in trouble are answers to stages."""
    if fault.kind == "call" and fault.name in {"QueryUpload", "Register", "ReportStatus", "Attend"}:
        return replace(fault, name="AnswerStage")
    return fault


def _fault(draw: random.Random, clients: tuple[str, ...]) -> Fault:
    at, client = round(draw.uniform(0.0, 30.0), 3), draw.choice(clients)
    short = round(draw.choice((0.1, 1.0, 3.0, 10.0, 30.0)) * draw.uniform(0.5, 1.0), 3)
    kind = draw.choice(list(_KINDS))
    return _KINDS[kind](draw, kind, client, at, short)


def _kill_server(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    """At any effect, or at one of a kind: rare kinds are as likely as frequent ones."""
    name = draw.choice(_SERVER_EFFECTS) if draw.random() < 0.6 else ""
    number = int(draw.choice((3, 10, 40 if name else 400)) * draw.random())
    short = short if draw.random() < 0.95 else LONG_DOWN_S
    return Fault("kill", SERVER, at, name, number, draw.choice(("before", "after", "torn")), short)


def _kill_client(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    name = draw.choice(_CLIENT_EFFECTS) if draw.random() < 0.6 else ""
    number = int(draw.choice((3, 10)) * draw.random())
    return Fault("kill", client, at, name, number, draw.choice(("before", "after", "torn")), short)


def _full(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    who = SERVER if draw.random() < 0.6 else client
    return Fault("full", who, at, number=int(20 * draw.random()), seconds=min(short, 15.0))


def _away(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    return Fault("away", SERVER, at, number=int(20 * draw.random()), seconds=min(short, 15.0))


def _block(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    return Fault("block", client, at, seconds=short)


def _call(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    how, method = draw.choice(("lost", "unanswered", "repeated", "late", "cut")), draw.choice(_CALLS)
    number = int(draw.choice((1, 4)) * draw.random())
    return Fault("call", client, 0.0, method, number, how, short)


def _clock(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    who = SERVER if draw.random() < 0.6 else client
    return Fault("clock", who, at, seconds=draw.choice((-86400.0, -3600.0, -30.0, 30.0, 3600.0, 86400.0)))


def _term(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    return Fault("term", SERVER, at, seconds=short)


def _wipe(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    return Fault("wipe", client, at, seconds=short)


def _lie(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    how = draw.choice(("nan", "infinity", "digest", "size", "examples", "epoch"))
    return Fault("lie", client, 0.0, number=int(3 * draw.random()), how=how)


def _operator(draw: random.Random, kind: str, client: str, at: float, short: float) -> Fault:
    how = draw.choice(("pause", "pause", "extend", "stop", "ban"))
    return Fault("operator", client, at, how=how, seconds=short)


_KINDS = {
    "kill server": _kill_server, "kill server again": _kill_server, "kill client": _kill_client, "full": _full,
    "away": _away, "block": _block, "call": _call, "call again": _call, "clock": _clock, "term": _term, "wipe": _wipe,
    "lie": _lie, "operator": _operator,
}  # fmt: skip
