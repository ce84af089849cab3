"""What runs cost in privacy: the account of a run's draws and its budget, its epsilon, and what devices state.

Our own accountant holds the budgets. The second accountant's epsilon is shown beside it. It is computed in one thread,
outside of the event loop and of scrapes, when somebody reads a run's privacy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple, Self

import structlog

from fl_common.privacy.accountant import Mechanism, Spent, epsilon_of
from fl_common.privacy.loss_distributions import is_installed, tight_epsilon_of
from fl_server.errors import InvalidInput
from fl_server.rounds.effects import OpenAttempt
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.privacy import PrivacySection
from fl_server.run_settings.sections import MAX_COUNT
from fl_server.store.client_work import ClientWork
from fl_server.store.records import ChargeRecord

log = structlog.get_logger()
_MOST_S = 15.0
"""A caller waits so long for an answer at most."""


@dataclass(frozen=True)
class Question:
    """What the account of a run has spent."""

    spent: Spent
    of_seen_cohorts: Spent
    """The same without amplification by the draws."""
    delta: float


@dataclass(frozen=True, slots=True)
class Tight:
    """An answer: both values of epsilon; None where this accountant has none."""

    epsilon: float | None
    of_seen_cohorts: float | None


class SecondAccountant:
    """Keeps the newest answer of each run. All methods but `settled` may be called in any thread."""

    def __init__(self, pool: ThreadPoolExecutor | None = None) -> None:
        """pool: of one thread, which starts with the first question."""
        self._pool = pool or ThreadPoolExecutor(1, thread_name_prefix="privacy")
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[None]] = {}
        self._answers: dict[str, tuple[Question, Tight]] = {}

    def newest(self, run_id: str, question: Question) -> Tight | None:
        """The latest answer about the run, which may be of fewer draws; asks for this one."""
        self._ask(run_id, question)
        return self._answers[run_id][1] if run_id in self._answers else None

    def exact(self, run_id: str, question: Question) -> Tight | None:
        """The answer to this question, if it is there already."""
        about, answer = self._answers.get(run_id, (None, None))
        return answer if about == question else None

    async def settled(self, run_id: str, question: Question) -> None:
        """Wait until `exact` has an answer, or for some seconds. At once without the extra."""
        end = asyncio.get_running_loop().time() + _MOST_S
        while (future := self._ask(run_id, question)) is not None:
            left = end - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=max(0.0, left))
            if not done:
                return

    def _ask(self, run_id: str, question: Question) -> Future[None] | None:
        """The computation under way for a run, one at a time; None: the answer is there, or there will be none."""
        if not is_installed() or self.exact(run_id, question) is not None:
            return None
        with self._lock:
            future = self._under_way.get(run_id)
            if future is None or future.done():
                future = self._under_way[run_id] = self._pool.submit(self._answer, run_id, question)
        return future

    def _answer(self, run_id: str, question: Question) -> None:
        try:
            values = [tight_epsilon_of(spent, question.delta) for spent in (question.spent, question.of_seen_cohorts)]
            answer = Tight(*values)
        except Exception as error:  # noqa: BLE001 - a library's; the first accountant's number is shown without it
            log.warning("second_accountant_failed", run=run_id, error=repr(error))
            answer = Tight(None, None)
        self._answers[run_id] = question, answer


def account_of(config: RunConfig) -> str:
    """The name of the account to which a private run is charged."""
    if config.client_privacy is None:
        raise RuntimeError("expected a run with the section privacy")
    return config.client_privacy.account or config.task.name


@dataclass(frozen=True)
class Account:
    """What the account of a run was charged when the run was created, restored or continued."""

    name: str
    privacy: PrivacySection
    rate: float
    """q of the run."""
    others: Counter[Mechanism]
    """The draws of other runs."""
    own: int = 0
    """The draws of this run."""
    fixed_size: bool = False
    """Whether cohorts have a fixed size: with secure aggregation."""

    def check(self) -> Account:
        """The account itself. Raises InvalidInput if not one draw of the run is within its budget."""
        if not self.most:
            raise InvalidInput(
                "privacy.max_epsilon",
                f"at least {self.epsilon(1):.3g}, for one draw of this run: the account {self.name!r} has spent"
                f" {self.epsilon(0):.3g} before; more noise or a lower rate costs less",
                f"{self.privacy.limit:g}",
            )
        return self

    @classmethod
    def of(cls, run_id: str, config: RunConfig, charges: Iterable[ChargeRecord]) -> Account:
        """charges: all of the account."""
        if config.client_privacy is None:
            raise RuntimeError("expected a run with the section privacy")
        others, own, fixed_size = Counter[Mechanism](), 0, config.secure_aggregation is not None
        for charge in charges:
            if charge.run_id == run_id:
                own += 1
            else:
                others[Mechanism(charge.noise_multiplier, charge.rate, charge.fixed_size)] += 1
        if any(mechanism.fixed_size != fixed_size for mechanism in others):
            kinds = "drawn each by itself", "of a fixed size"
            expected = f"an account of its own: {account_of(config)!r} has charges for cohorts {kinds[not fixed_size]}"
            raise InvalidInput("privacy.account", expected, f"a run with cohorts {kinds[fixed_size]}")
        return cls(account_of(config), config.client_privacy, config.rate_of_clients, others, own, fixed_size)

    @cached_property
    def most(self) -> int:
        """The most draws of this run within its budget."""
        fits, too_many = 0, 1
        while too_many <= MAX_COUNT and self.epsilon(too_many) <= self.privacy.limit:
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.epsilon(middle) <= self.privacy.limit:
                fits = middle
            else:
                too_many = middle
        return fits

    def epsilon(self, draws: int, *, seen: bool = False) -> float:
        """What the account has spent after so many draws of this run. seen: for who sees the cohorts."""
        return epsilon_of(self.spent(draws, seen=seen), self.privacy.delta)

    def spent(self, draws: int, *, seen: bool = False) -> Spent:
        """All that the account was charged for, as `epsilon`."""
        spent = self.others + Counter({Mechanism(self.privacy.noise_multiplier, self.rate, self.fixed_size): draws})
        if not seen:
            return spent
        without = Counter[Mechanism]()
        for mechanism, count in spent.items():
            without[Mechanism(mechanism.noise_multiplier, 1.0, mechanism.fixed_size)] += count
        return without

    def question(self, draws: int) -> Question:
        """What the second accountant is asked after so many draws of this run."""
        return Question(self.spent(draws), self.spent(draws, seen=True), self.privacy.delta)

    def with_noise(self, noise_multiplier: float) -> Account:
        """The account if the run had this noise."""
        return replace(self, privacy=self.privacy.model_copy(update={"noise_multiplier": noise_multiplier}))

    def charge(self, run_id: str, opened: OpenAttempt, draws: int, clip: float) -> ChargeRecord:
        """The charge of a draw. draws: those of this run, with this one; clip: C of the round."""
        number = self.others.total() + draws
        z = self.privacy.noise_multiplier
        return ChargeRecord(
            self.name, number, run_id, opened.round, opened.attempt, z, self.rate, time.time(), clip, self.fixed_size
        )


class Stated(NamedTuple):
    """What devices state that their data has spent, each over all runs with privacy of records."""

    clients: int
    """Those that state it."""
    median: float
    largest: float
    delta: float
    """That of the largest epsilon."""

    @classmethod
    def of(cls, works: Iterable[ClientWork]) -> Self | None:
        """None if no device states it."""
        known = [(work.epsilon, work.delta) for work in works if work.epsilon is not None and work.delta is not None]
        return cls(len(known), median(epsilon for epsilon, _ in known), *max(known)) if known else None
