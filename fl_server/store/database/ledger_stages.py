"""Stages of secure aggregation in the ledger, and the answers of clients."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import insert
from sqlalchemy import update as change

from fl_server.store.database import rows, schema
from fl_server.store.database.rows import find, write_history
from fl_server.store.database.transactions import Transactions
from fl_server.store.records import STAGES, AnswerRecord, HistoryRecord, StageRecord

_KEY = ("run_id", "round", "exchange", "attempt", "stage")


class StageLedger(Transactions):
    """The part of the `Store` for rounds with secure aggregation."""

    def open_stage(self, stage: StageRecord, seconds: float, why: HistoryRecord | None = None) -> None:
        """Write that a stage is open, with its members and its time. The same key again changes nothing."""
        with self._transaction(f"open the stage {stage.stage} of run {stage.run_id!r} round {stage.round}") as db:
            if find(db, schema.secure_stages, **{name: getattr(stage, name) for name in _KEY}) is None:
                db.execute(insert(schema.secure_stages), rows.to_row(stage))
                attempt = {name: getattr(stage, name) for name in _KEY[:-1]}
                db.execute(change(schema.attempts).filter_by(**attempt).values(seconds_left=seconds))
                write_history(db, why)

    def stages(self, run_id: str, round: int) -> list[StageRecord]:
        """The stages of a round's latest draw, in the order in which they were opened."""
        stages = [rows.stage(row) for row in self._rows("stages", schema.secure_stages, run_id=run_id, round=round)]
        latest = max((stage.attempt for stage in stages), default=0)
        return sorted((each for each in stages if each.attempt == latest), key=lambda stage: STAGES.index(stage.stage))

    def add_answer(self, answer: AnswerRecord) -> bytes:
        """Write a client's first answer to a stage. Returns the answer that stands: another one changes nothing."""
        key = {name: getattr(answer, name) for name in (*_KEY, "client_id")}
        doing = f"write the answer of {answer.client_id!r} to the stage {answer.stage} of run {answer.run_id!r}"
        with self._transaction(doing) as db:
            if (first := find(db, schema.secure_answers, **key)) is not None:
                return bytes(first["content"])
            db.execute(insert(schema.secure_answers), rows.to_row(answer))
            return answer.content

    def answers(self, run_id: str, round: int, attempt: int) -> Mapping[str, dict[str, bytes]]:
        """Stage -> client -> answer, of one draw of a round."""
        found: dict[str, dict[str, bytes]] = {}
        key = {"run_id": run_id, "round": round, "attempt": attempt}
        for row in self._rows("answers of stages", schema.secure_answers, **key):
            found.setdefault(row["stage"], {})[row["client_id"]] = bytes(row["content"])
        return found
