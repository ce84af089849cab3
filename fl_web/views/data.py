"""Answers that are no pages: curves for the charts, rounds as CSV, and models."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.responses import JSONResponse, Response, StreamingResponse

from fl_web.charts import MOST_POINTS, chart_json, marks, present_charts
from fl_web.coordinator.calls import Failed
from fl_web.coordinator.reader import Reader
from fl_web.facts.rounds import column, seconds_of
from fl_web.rendering import iso
from fl_web.views.compare import compare_json, compared
from fl_web.views.run import mark_events
from fl_web.views.view import Params
from protos.fl.v1 import admin_pb2 as pb

_HISTORY = 100
_MOST_MARKS = 500


async def curves(reader: Reader, params: Params) -> Response:
    """All curves of a run, thinned."""
    run_id = params.text("id")
    run, rounds, history = await reader.run(run_id), await reader.rounds(run_id), await reader.entries(run_id, _HISTORY)
    created = seconds_of(run.created)
    events = mark_events(await reader.marked_entries(run_id, history))
    marked = marks(rounds, created, events)[-_MOST_MARKS:]
    charts = [chart_json(chart, rounds, run) for chart in present_charts(rounds)]
    return JSONResponse({"charts": charts, "marks": marked})


async def compare_curves(reader: Reader, params: Params) -> Response:
    """The curves of a comparison, thinned."""
    runs, _ = await compared(reader, params)
    return JSONResponse(compare_json(runs, MOST_POINTS))


async def rounds_csv(reader: Reader, params: Params) -> Response:
    """All rounds of a run, with the columns of `fl_ops.notebook`."""
    rounds, out = await reader.rounds(params.text("id")), io.StringIO()
    values = [of.values() for of in rounds]
    names = list(dict.fromkeys(name for row in values for name in row))
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["round", "committed", *map(column, names), "model_digest", "averaged_digest"])
    for of, row in zip(rounds, values, strict=True):
        own = [row.get(name) for name in names]
        writer.writerow([of.round, iso(of.committed), *own, of.digest, of.averaged_digest])
    return Response(out.getvalue(), media_type="text/csv", headers=_attachment(f"{params.text('id')}-rounds.csv"))


async def model(reader: Reader, params: Params) -> Response:
    """A committed model as a safetensors file. `round`: "best", "latest" or a number; `model`: "averaged" or none."""
    run_id, which, kind = params.text("id"), params.text("round") or "latest", params.text("model")
    messages = reader.model(run_id, which, kind)
    first = await anext(messages, None)
    if first is None or not first.HasField("header"):
        raise Failed("the coordinator sent no model")
    header = first.header
    round_ = f"-round-{header.round.round}" if header.HasField("round") else ""
    name = f"{run_id}{round_}{'-averaged' if kind == 'averaged' else ''}.safetensors"
    headers = {
        **_attachment(name),
        "Content-Length": str(header.size_bytes),
        "X-Content-BLAKE3": header.digest.value.hex(),
    }
    return StreamingResponse(
        _chunks(messages, header.size_bytes), media_type="application/octet-stream", headers=headers
    )


async def _chunks(messages: AsyncGenerator[pb.ExportModelResponse, None], size: int) -> AsyncIterator[bytes]:
    """The bytes of the file. A file that ends early breaks the connection, so that a browser reports it."""
    sent = 0
    async with aclosing(messages):
        async for message in messages:
            if message.chunk.offset != sent:
                raise Failed(f"expected bytes from {sent} on, got them from {message.chunk.offset}")
            sent += len(message.chunk.data)
            yield message.chunk.data
    if sent != size:
        raise Failed(f"expected {size} bytes, got {sent}")


def _attachment(name: str) -> dict[str, str]:
    """A run's id has only characters that need no quoting."""
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
    return {"Content-Disposition": f'attachment; filename="{safe}"'}
