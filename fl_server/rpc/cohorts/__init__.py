"""ListCohort: the clients of a round under way as messages, page by page.

What a client's phase is belongs to `fl_server.run.status`; here it becomes messages of admin.proto.
"""

from __future__ import annotations

from fl_server.rpc.pages import Cursor, Entries, Position
from fl_server.run.run import Run
from fl_server.run.status.cohort import HasAll, Member, by_phase, drawn, members
from protos.digests import digest_bytes
from protos.fl.v1 import admin_pb2 as pb


async def cohort_page(run: Run, request: pb.ListCohortRequest) -> pb.ListCohortResponse:
    """A page of the clients of the round under way, in the order of id. Raises InvalidInput."""
    state, transfers, has_all = run.state, run.log.transfers, _has_all(run)
    clients = drawn(state)
    cursor = Cursor.of_request(request, (str,), "cohort", run.id)

    async def read(after: Position | None, count: int) -> Entries[pb.CohortMember]:
        following = [client for client in clients if after is None or client > after[0]][:count]
        return [((member.client,), _message(member)) for member in members(state, transfers, has_all, following)]

    page = await cursor.page(read)
    return pb.ListCohortResponse(
        members=page.entries, next_page_token=page.next_token, round=state.round, exchange=state.exchange,
        by_phase=by_phase(state, transfers, has_all),
    )  # fmt: skip


def _has_all(run: Run) -> HasAll:
    """By what went out to the present process of each daemon, for whatever run or round it was."""
    needed = {digest_bytes(broadcast.resource.digest) for broadcast in run.model.broadcasts}
    sessions = run.context.fleet.sessions

    def has_all(client: str) -> bool:
        session = sessions.of(client)
        return bool(needed) and session is not None and needed <= session.sent.keys()

    return has_all


def _message(member: Member) -> pb.CohortMember:
    message = pb.CohortMember(client_id=member.client, phase=member.phase, detail=member.detail)
    if member.transfer is not None and member.moving:
        message.done_bytes, message.size_bytes = member.transfer.done, member.transfer.size
    if member.seconds is not None:
        message.phase_s = member.seconds
    return message
