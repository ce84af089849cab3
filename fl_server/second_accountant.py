"""Epsilon of runs by the second accountant, computed in one thread, outside of the event loop and of scrapes.

It is shown beside the first one, which holds the budgets. Whoever reads a run's privacy asks for it, so a coordinator
whose numbers nobody reads computes nothing.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from fl_common.privacy.accountant import Spent
from fl_common.privacy.loss_distributions import is_installed, tight_epsilon_of

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
