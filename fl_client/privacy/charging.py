"""Charges an assignment with privacy to the account of the device's data, before its first step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_client.errors import StateError, beyond_limits
from fl_client.gates.state_directory import StateDirectory
from fl_client.monitoring.metrics import Metrics
from fl_client.policy.site import SitePolicy
from fl_client.privacy.account import Account
from fl_client.privacy.files import AccountFiles
from fl_client.training.private import PrivateWork, applied_to, private_work
from fl_client.training.private_data import PrivateData
from protos.fl.v1 import training_pb2

log = structlog.get_logger()


class PrivacyCharging:
    """The accounts of a running daemon, by the name of the data. For the event loop; files are for the disk thread."""

    def __init__(  # noqa: PLR0913, PLR0917 - parts of the daemon
        self, state_dir: Path, threads: int, state: StateDirectory, policy: SitePolicy, metrics: Metrics
    ) -> None:
        """state_dir: with the accounts. threads: of torch."""
        self._state_dir, self._threads, self._state = state_dir, threads, state
        self._policy, self._metrics = policy, metrics
        self._accounts: dict[str, Account] = {}
        """Those that were read, by the name of the data."""
        self._turn = asyncio.Lock()

    async def begin(
        self, assignment: training_pb2.Assignment, bundles: Mapping[ResourceKey, Bundle], data: PrivateData, name: str
    ) -> PrivateWork:
        """Charge all steps of an assignment with privacy, durably. name: of the data.

        Work that is charged already, as after a restart, is not charged again.

        Raises:
            PolicyRefused: the site's limit would be exceeded. Nothing is charged then.
            WorkFailed: the account cannot be written, or the assignment is not valid.
        """
        rules = self._policy.policy.privacy
        applied = applied_to(assignment.training, rules.min_noise_multiplier or 0.0, rules.max_delta or 1.0)
        async with self._turn:
            account = await self._read(name)
            work = await asyncio.to_thread(
                private_work, assignment, bundles, data, account.secret, applied, self._threads
            )
            if not account.has(work.identity):
                account = account.with_charge(work.identity, work.mechanism, work.steps, applied.delta)
                self._check_limit(self._accounts[name], account)
                await self._state.required(self._files(name).write, account)
                self._accounts[name] = account
        spent = account.epsilon(applied.delta)
        self._metrics.privacy_spent.set(max(one.epsilon() for one in self._accounts.values()))
        log.info(
            "privacy_charged", run=assignment.key.run_id, round=assignment.key.round, steps=work.steps,
            epsilon=round(spent, 4), delta=applied.delta,
        )  # fmt: skip
        return replace(work, epsilon=spent) if self._policy.policy.share.privacy else work

    def _files(self, name: str) -> AccountFiles:
        return AccountFiles.of(self._state_dir, name)

    def _check_limit(self, before: Account, charged: Account) -> None:
        limit = self._policy.policy.privacy.max_epsilon
        if limit is None or (after := charged.epsilon()) <= limit:
            return
        now = before.epsilon()
        raise self._policy.refused(
            "privacy",
            f"privacy.max_epsilon is {limit:g} at delta {charged.delta:g}, {now:.3g} of it is spent, and it would be"
            f" {after:.3g} after this assignment",
        )

    async def _read(self, name: str) -> Account:
        """The account, which is made if there is none yet. Its charges are counted beside it from here on."""
        if name not in self._accounts:
            try:
                account = await self._state.required(self._files(name).read)
            except StateError as error:
                log.error("privacy_account_lost", problem=str(error))
                message = "this device's privacy account is lost or cannot be read; its log says what to do"
                raise beyond_limits(message) from error
            if account is None:
                account = Account.new()
                await self._state.required(self._files(name).write, account)
            else:
                await self._state.required(self._files(name).count, account)
            self._accounts[name] = account
        return self._accounts[name]
