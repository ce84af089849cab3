"""An accepted update is refused after all, because it spoils what its round comes to: carried out here.

The ledger has all of it in one transaction: the refusals, what they mean for the clients, and that the accepted list is
forgotten. A coordinator that dies before it finds the same culprits again, and one that dies behind it is in a round
some of whose clients were refused.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from fl_server import events as ev
from fl_server.outcomes import uncounted_outcome
from fl_server.progress import Progress
from fl_server.store.base import HistoryRecord, UpdateRecord
from protos.codec import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()


async def drop_culprits(run: Run, command: ev.DropCulprits) -> None:
    """Refuse accepted updates after all: first in the ledger, with what it means for their clients; then they hear."""
    ledger, fleet, why_of = run.parts.ledger, run.parts.fleet, dict(command.culprits)
    updates = await ledger.insist(run.no_room, ledger.store.updates, run.id, command.round, command.exchange)
    name = RefusalReason.Name(RefusalReason.REFUSAL_REASON_NORM)
    refused = [
        replace(update, admitted=False, reason=name, detail=why_of[update.client_id])
        for update in updates
        if update.client_id in why_of
    ]
    weighed = [fleet.quarantine.weigh(update) for update in refused]
    whys = [
        HistoryRecord(time.time(), "coordinator", "culprit_dropped", run.id, f"round {command.round}, {client}: {why}")
        for client, why in command.culprits
    ]
    standings = [standing for standing, _ in weighed if standing is not None]
    quarantined = [why for _, why in weighed if why is not None]
    await ledger.insist(run.no_room, ledger.store.refuse_accepted, refused, standings, [*whys, *quarantined])
    for standing, why in weighed:
        if standing is not None:
            fleet.keep_standing(standing, why)
    for update in refused:
        await _refused_after_all(run, update)


async def _refused_after_all(run: Run, update: UpdateRecord) -> None:
    """A client's update was dropped."""
    client = update.client_id
    run.tally.refused("norm")
    run.intake.refused.add(client)
    run.look_again()
    log.warning("culprit_dropped", run=run.id, round=update.round, client=client, why=update.detail)
    run.watchers.tell(Progress("client_out", f"{client}: {update.detail}"))
    key = ExchangeKey(run_id=run.id, round=update.round, exchange=update.exchange)
    outcome = uncounted_outcome(key, RefusalReason.REFUSAL_REASON_NORM, run.record.state_epoch)
    outcome.digest.CopyFrom(digest_message(update.digest))
    run.parts.fleet.push(client, pb.AttendResponse(outcome=outcome))
    await run.parts.fleet.note(client, f"update refused (norm): {update.detail}"[:300])
    run.intake.not_finite_from(client)
