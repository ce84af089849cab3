"""How a run's rounds are filled and closed. The policy is fixed for the life of the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fl_server.rounds.sampling import Draw, Sampling, draw_bernoulli, draw_fixed
from fl_server.rounds.stop_rules import StopPolicy

_NEVER_STOPS = StopPolicy()


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """How a run's rounds are filled and closed. It is fixed for the life of the run."""

    seed: int
    sampling: Sampling = "fixed"
    clients_per_round: int = 1
    """m of fixed-size sampling."""
    rate: float = 0.0
    """p of Bernoulli sampling."""
    min_clients: int = 1
    """Clients that must be eligible before the first draw of a round."""
    close: Literal["cohort", "goal", "buffer"] = "cohort"
    concurrency: int = 1
    """With close = "buffer": most clients at work."""
    goal: int = 1
    """With close = "buffer": updates of a step."""
    max_staleness: int = 0
    """With close = "buffer": most steps between the version that an update began from and the step that it is in."""
    quorum: int = 1
    """Fewest updates that may close a round; a smaller cohort needs all of itself. 0: half of the goal."""
    min_accepted: int = 1
    """Fewest updates that a model may be made of: no cohort is smaller, and no round closes with fewer."""
    deadline_s: float = 600.0
    over_selection: float = 1.3
    """Clients drawn for each update wanted, with close = "goal", before any drop-out was observed."""
    exchanges: int = 1
    """Collections in a round."""
    population: int = 0
    """N, the most clients that may ever take part; 0: no limit."""
    evaluate_every: int = 1
    """Rounds between evaluations; 0: never."""
    await_evaluation: bool = False
    """The next round waits for the evaluation, because a stop rule uses its metric."""
    ask_clients_every: int = 0
    """Rounds between evaluations by clients; 0: never."""
    await_clients: bool = False
    """The next round waits for the clients' evaluation, because a stop rule uses its metric."""
    stop: StopPolicy = _NEVER_STOPS
    """When an evaluation ends the run."""
    most_processes: int = 0
    """Processes of one client's daemon that are sent the work of an exchange without an answer; 0: no limit."""
    rounds_between_restarts: int = 0
    """Rounds that are committed between two restarts of the client states because of lost ones."""
    private: bool = False
    """Client-level privacy: each client is drawn by itself, and a round closes with what came, even nothing. There are
    no replacements, because who takes part must not depend on the others."""
    most_draws: int = 0
    """Draws of cohorts that the run's privacy budget allows; 0: no limit."""
    secure: bool = False
    """Secure aggregation: updates are masked, so a cohort has no replacements, and a round that loses too many of its
    clients is abandoned with all that it has."""
    on_drop: Literal["repeat", "end"] = "repeat"
    """What follows an abandoned round: another draw for it, or the end of the run."""
    tells_clients: bool = True
    """Whether reasons tell how many clients of a cohort have answered, and which one has spoiled its round."""
    most_full: int = 20
    """Clients up to which everybody holds shares of everybody's secrets, so that no coins are tossed for the graph."""
    stage_s: float = 60.0
    """Deadline of each stage of secure aggregation, but for the masked updates, which have `deadline_s`."""

    @property
    def buffered(self) -> bool:
        """Whether the rules of `buffer.py` hold."""
        return self.close == "buffer"

    def cohort(self, candidates: Iterable[str], size: int, draw: Draw) -> tuple[str, ...]:
        """The first cohort of a round. size: that of a fixed cohort."""
        if self.sampling == "bernoulli":
            return draw_bernoulli(candidates, self.rate, draw, 0 if self.private else self.min_accepted)
        return draw_fixed(candidates, size, draw)

    def goal_of(self, cohort: tuple[str, ...]) -> int:
        """The goal of a round whose first attempt drew this cohort: 1 for an empty one, since 0 is before the draw."""
        return max(1, len(cohort)) if self.sampling == "bernoulli" else min(self.clients_per_round, len(cohort))

    def drawn_of(self, clients: int) -> float:
        """How many of so many clients a round draws, in the mean."""
        return self.rate * clients if self.sampling == "bernoulli" else self.clients_per_round
