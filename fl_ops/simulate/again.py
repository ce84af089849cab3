"""`fl simulate --replay`: a coordinator's run, read from its ledger, done again with clients that are at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fl_ops.errors import Refused
from fl_ops.simulate.clients import deal
from fl_ops.simulate.daemons import load_daemons
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.replay import Replay, ReplayedRound, config_of, find_run, open_ledger
from fl_ops.simulate.seeds import in_words, interruptible
from fl_ops.simulate.settings import Plan, read_plan
from fl_ops.simulate.shown import say
from fl_server.run_config import RunConfig
from tasks import load_task


@dataclass(frozen=True, slots=True)
class Replayed:
    """Which run is done again, and where its clients stand."""

    run_id: str
    ledger: Path | str
    """The coordinator's state directory, or the URL of its ledger."""
    config: Path
    client_configs: Path | None


def replay(asked: Replayed, console: Console) -> dict[str, Any]:
    """Do a run again, a line for each round; what it came to. Raises OpsError."""
    ledger = open_ledger(asked.ledger)
    try:
        plan = read_plan(asked.config)
        with in_words():
            config = _here(config_of(find_run(ledger, asked.run_id)), plan)
            federation = _federation(config, plan, asked.client_configs)
        rounds = []
        with federation, interruptible():
            for each in Replay(ledger, asked.run_id, federation).rounds():
                rounds.append(each)
                say(console, compared(each))
    finally:
        ledger.close()
    if not rounds:
        raise Refused(f"run {asked.run_id} has no committed round yet")
    facts = [{"round": each.round, "model": each.digest, "expected": each.expected} for each in rounds]
    return {"run_id": asked.run_id, "same": all(each.same for each in rounds), "rounds": facts}


def verdict(facts: dict[str, Any]) -> str:
    """What a replay came to, in words."""
    rounds, last = facts["rounds"], facts["rounds"][-1]["round"]
    if facts["same"]:
        return f"run {facts['run_id']}: {len(rounds)} rounds done again, every model the ledger's bit for bit"
    return f"run {facts['run_id']}: the model of round {last} is not the ledger's; the rounds before it are the same"


def compared(done: ReplayedRound) -> str:
    """A replayed round in words."""
    start = f"round {done.round}: {len(done.accepted)} clients, "
    if done.same:
        return f"{start}same model, {done.digest}"
    who = f"; other updates than theirs came of {', '.join(done.differing)}" if done.differing else ""
    return f"{start}ANOTHER model: expected {done.expected}, got {done.digest}{who}"


def _here(config: RunConfig, plan: Plan) -> RunConfig:
    """The run's configuration with the task's options of this machine's file, such as where its data lie."""
    options = {**config.task.options, **plan.config.task.options}
    return config.model_copy(update={"task": config.task.model_copy(update={"options": options})})


def _federation(config: RunConfig, plan: Plan, client_configs: Path | None) -> Federation:
    if client_configs is None:
        dealt = deal(Plan(config, plan.simulation), config.seed)
        return Federation(config, dealt.clients.task, dealt.clients)
    clients = load_daemons(client_configs, config.task.name)
    return Federation(config, load_task(config.task.name, config.task.options), clients)
