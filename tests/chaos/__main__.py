"""`python -m tests.chaos --seeds 200`: plays seeds one after the other; exit code 1 if one failed."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import structlog
import torch

from tests.chaos.arena import Arena
from tests.chaos.plan import plan
from tests.chaos.trial import Trial, play, summed_up
from tests.integration.processes import HERE, Place


class Season:
    """Seeds on one arena, and on a new one after a seed that failed; the failed one's folder stays."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.failed: dict[int, str] = {}
        self.survived = 0
        self._open = ExitStack()
        self._arena: Arena | None = None
        self._folder = Path()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._arena is not None:
            shutil.rmtree(self._folder)

    def seed(self, number: int) -> None:
        """Play one seed, and say how it went."""
        trial = Trial(plan(number))
        try:
            play(self._started(), trial)
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed has failed
            self._fail(trial, error)
            return
        finally:
            self.trials.append(trial)
        self.survived += 1
        states = ", states agree" if trial.states_checked else ""
        print(f"{_head(trial)}  survived{states}  {trial.plan}", flush=True)
        for missed in trial.missed:
            print(f"           did not happen: {missed}", flush=True)

    def _started(self) -> Arena:
        if self._arena is None:
            self._folder = Path(tempfile.mkdtemp(prefix="impetus-chaos-"))
            self._arena = self._open.enter_context(Arena(self._open.enter_context(Place(self._folder))))
        return self._arena

    def _end(self) -> None:
        self._open.close()
        self._open = ExitStack()

    def _fail(self, trial: Trial, error: Exception) -> None:
        why = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        number = trial.plan.seed
        self.failed[number] = why
        print(f"{_head(trial)}  FAILED    {trial.plan}", flush=True)
        print(f"    {why}\n    logs: {self._folder}\n    again: {again(number)}", flush=True)
        self._end()
        self._arena = None


def again(number: int) -> str:
    """The command that repeats a seed."""
    return f"python -m tests.chaos --seed {number}"


def _head(trial: Trial) -> str:
    return f"seed {trial.plan.seed:4}  {len(trial.happened)} faults  {trial.seconds:5.1f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Let things go wrong, and check.")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them")
    parser.add_argument("--seed", type=int, metavar="SEED", help="play this one alone")
    options = parser.parse_args(arguments)
    first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    sys.path.insert(0, str(HERE))  # where the task is
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Season() as season:
        try:
            for number in range(first, first + count):
                season.seed(number)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
    print(json.dumps(summary(season), indent=1))
    return 0 if season.survived == count else 1


def summary(season: Season) -> dict[str, object]:
    """What was injected and survived, and how to see again what was not."""
    failed = {again(number): why for number, why in season.failed.items()}
    return {
        "seeds": len(season.trials),
        "survived": season.survived,
        **summed_up(season.trials),
        "states_checked": sum(trial.states_checked for trial in season.trials),
        "seconds": round(sum(trial.seconds for trial in season.trials), 1),
        "failed": failed,
    }


if __name__ == "__main__":
    sys.exit(main())
