"""This system: a coordinator and daemons with mTLS and their default settings."""

from __future__ import annotations

from benchmarks.deployment import TASK, Deployment
from benchmarks.rivals.contest import Case, Place, Running
from fl_ops.admin.client import AdminClient
from protos.fl.v1 import admin_pb2


def start(case: Case, place: Place) -> Running:
    """Start coordinator, daemons and a run of FedAvg with all clients in every round."""
    deployment = Deployment(place.folder, place.processes, tls=True)
    server = deployment.serve()
    task = f'name = "{TASK}"\noptions = {{parameters = {case.parameters}, tensors = {case.tensors}}}\n'
    for index in range(case.clients):
        deployment.daemon(f"client-{index:03d}", server.address, task)
    admin = place.stack.enter_context(AdminClient(server.admin))
    run = admin.runs.create_run(_spec(case)).run.run_id

    def ends() -> list[float]:
        # The list of rounds is read once, at the end: the coordinator's work for it would count as that of the rounds.
        if admin.runs.get_run(run, newest=0).run.rounds_done < case.rounds + 1:
            return []
        rounds = admin.runs.get_run(run).rounds
        return [row.committed.ToNanoseconds() / 1e9 for row in rounds]

    return Running(server.child, ends, server.child.log)


def _spec(case: Case) -> admin_pb2.RunSpec:
    spec = admin_pb2.RunSpec(name="rivals", seed=0)
    spec.task.name = TASK
    spec.task.options.update({"parameters": case.parameters, "tensors": case.tensors})
    spec.algorithm.name = "fedavg"
    spec.local.learning_rate = 1.0
    spec.round.clients_per_round = spec.round.min_clients = case.clients
    spec.stop.rounds = case.rounds + 1
    spec.evaluation.every = 0
    return spec
