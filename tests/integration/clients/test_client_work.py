"""Devices that fail at times, are slow, or are refused, are named with the same numbers after a kill."""

from __future__ import annotations

from typing import Any

import pytest

from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually

OPTIONS: dict[str, dict[str, Any]] = {
    "good-1": {}, "good-2": {}, "failing": {"fails": "sometimes"}, "slow": {"step_s": 0.3}, "loud": {"loud": 1e6},
}  # fmt: skip


def seen(server: Coordinator) -> dict[str, Any]:
    """What operators see of clients, and the counts of the run."""
    with server.admin() as admin:
        overview = admin.call(admin_pb2.GetOverviewRequest(), admin_pb2.GetOverviewResponse)
        clients = admin.clients.list_clients(order=admin_pb2.CLIENT_ORDER_ATTENTION)
        account = admin.runs.get_run("r").run.account
    return {
        "works": {client.client_id: client.work for client in clients},
        "needs": [(client.client_id, need.reason) for client in clients for need in client.attention],
        "overview": [(client.client_id, client.attention.reason) for client in overview.attention],
        "number": overview.clients_by_state["attention"],
        "account": (dict(account.assignments), dict(account.refused)),
    }


@pytest.mark.slow  # a run of fifteen rounds in which one device is slow
def test_bad_devices_are_named_and_a_kill_changes_no_number(workspace: Workspace) -> None:
    """The good ones need no attention; every count is the same once the killed coordinator is back."""
    server = Coordinator(workspace, settings={"limits": {"reattach_grace_s": 60.0}}).serve()
    for index, (name, options) in enumerate(OPTIONS.items()):
        shard = {"partition": {"method": "iid", "clients": len(OPTIONS), "seed": 1}, "index": index}
        Daemon(workspace, server, name, shard=shard, options=options).start()
    server.until_present(*OPTIONS)
    server.create(
        "r", local={"epochs": None, "steps": 2, "batch_size": 8, "learning_rate": 0.1}, stop={"rounds": 15},
        round={"clients_per_round": 5, "min_clients": 5, "quorum": 2, "max_update_norm": 100.0, "deadline_s": 60.0},
    )  # fmt: skip
    server.completed("r")
    eventually(lambda: seen(server)["works"]["good-1"].rounds == 15, "the last round is counted")
    before = seen(server)
    assert before["needs"] == [("loud", "quarantined"), ("loud", "refused"), ("failing", "failing"), ("slow", "slow")]
    assert before["overview"] == [("loud", "quarantined"), ("failing", "failing"), ("slow", "slow")]
    works, (assignments, refused) = before["works"], before["account"]
    assert works["failing"].failed == assignments["failed"] == 5
    assert "tiny_task.py" in works["failing"].last_failure.cause
    assert works["loud"].last_refusal.cause == "norm"
    assert refused == {"norm": works["loud"].refused}
    assert works["loud"].refused == assignments["refused"] == 3
    assert sum(work.admitted for work in works.values()) == assignments["admitted"]
    assert works["slow"].work_s > 2 * works["good-1"].work_s
    server.kill()
    server.serve()
    server.until_present(*OPTIONS)
    assert seen(server) == before
