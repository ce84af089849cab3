"""Where results go: tables for people or JSON for programs on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType

from fl_ops.units import plain

_PIPE_WIDTH = 240

Answer = Message | Mapping[str, Any] | Sequence[Message]


def show(answer: Answer, rendering: RenderableType, as_json: bool) -> None:
    """One command's result: `answer` as JSON, or `rendering`."""
    if as_json:
        print(json.dumps(to_json(answer), indent=2))
    elif isinstance(rendering, str):
        print("\n".join(map(plain, rendering.split("\n"))))
    else:
        _console().print(rendering)


def _console() -> Console:
    """Standard output; a pipe has no width, so that lines are not broken for `grep`."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_PIPE_WIDTH)


def show_line(answer: Message) -> None:
    """One JSON object on a line of its own, at once: for streams."""
    print(json.dumps(to_json(answer)), flush=True)


def complain(text: str) -> None:
    """An error, on stderr."""
    print(f"error: {plain(text)}", file=sys.stderr)


def to_json(answer: Answer) -> Any:
    """A message as protobuf's JSON with the fields' own names; unset ones that have a default are written out."""
    if isinstance(answer, Message):
        return MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    if isinstance(answer, Mapping):
        return dict(answer)
    return [to_json(message) for message in answer]
