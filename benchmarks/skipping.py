"""Rounds to 1e-8 on least squares of several condition numbers: random skipping, a fixed period, and neither.

    python -m benchmarks.skipping

ProxSkip with p = 1 / sqrt(condition), SCAFFOLD's option II with K = sqrt(condition) steps, and both with one step a
round, which is gradient descent. All have the rate 1, the inverse of the clients' smoothness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import algorithms as fl
from fl_server.rounds.sampling import drawn_steps
from fl_tasks import Examples, PartitionSpec, Shard, partition_task
from fl_tasks.built_in.least_squares import LeastSquares
from fl_tasks.evaluation import evaluate

CONDITIONS = (25, 100)
SEEDS = range(5)
CLIENTS, TARGET, MOST = 4, 1e-8, 5000


def participant(task: LeastSquares, client: str, part: Examples, steps: int) -> fl.Participant:
    """A client whose batches are all of its examples."""
    batch = (part.inputs, part.targets)
    data = fl.LocalData([batch] * steps, [batch], task.loss)
    return fl.Participant(client, len(part), lambda exchange: data)


def rounds_to_target(condition: float, algorithm: fl.Algorithm, steps: Callable[[int], int]) -> tuple[int, int]:
    """Rounds until the gap is at most TARGET, and the local steps until then. steps: of a round."""
    task = LeastSquares(dimension=10, clients=CLIENTS, condition=condition)
    parts = [task.train_data(Shard(part)) for part in partition_task(PartitionSpec("natural", CLIENTS), task)]
    model, done = task.model(), 0
    state = fl.start_run(algorithm, model)
    for number in range(MOST):
        count = steps(number)
        cohort = [participant(task, str(client), part, count) for client, part in enumerate(parts)]
        info = fl.RoundInfo(number, 1.0, population=CLIENTS)
        state = fl.run_round(algorithm, state, model, cohort, fl.LocalSettings(1.0), info).state
        done += count
        fl.load_state(model, fl.ModelState(state.server.x, {}, {}))
        if evaluate(task, model, task.eval_data())["gap"] <= TARGET:
            return number + 1, done
    raise RuntimeError(f"expected a gap of {TARGET} within {MOST} rounds at condition {condition}")


def main() -> None:
    """Print the table."""
    print("| condition | gradient descent | SCAFFOLD, K steps | ProxSkip, p = 1 / K | its local steps |")
    print("| --: | --: | --: | --: | --: |")
    for condition in CONDITIONS:
        K = math.isqrt(condition)
        plain, _ = rounds_to_target(condition, fl.build("fedavg", weights="uniform"), lambda _: 1)
        fixed, _ = rounds_to_target(condition, fl.build("scaffold"), partial(_same, K))
        proxskip = fl.build("proxskip", p=1 / K)
        found = [rounds_to_target(condition, proxskip, partial(_drawn, 1 / K, seed)) for seed in SEEDS]
        rounds, steps = zip(*found, strict=True)
        spans = " | ".join(f"{min(values)} to {max(values)}" for values in (rounds, steps))
        print(f"| {condition} | {plain} | {fixed} | {spans} |", flush=True)


def _same(steps: int, round_: int) -> int:
    del round_
    return steps


def _drawn(p: float, seed: int, round_: int) -> int:
    return drawn_steps(p, seed, round_, 10**6)


if __name__ == "__main__":
    main()
