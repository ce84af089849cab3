"""Output of commands: tables or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType

from fl_common.units import plain

_PIPE_WIDTH = 1 << 16

Result = Message | Mapping[str, Any] | Sequence[Message]
Rendering = RenderableType | Callable[[], RenderableType]


def show(result: Result, rendering: Rendering, as_json: bool) -> None:
    """Print a command's result: `result` as JSON, or `rendering`; a function makes a large one only if it is needed."""
    if as_json:
        print(json.dumps(to_json(result), indent=2))
        return
    rendering = rendering() if callable(rendering) else rendering
    if isinstance(rendering, str):
        print("\n".join(map(plain, rendering.split("\n"))))
        return
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        console.print(rendering)
        return
    # A pipe has any width: no column is left out, `grep` finds whole lines, and none ends with blanks.
    wide = Console(width=_PIPE_WIDTH)
    with wide.capture() as capture:
        wide.print(rendering)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def show_line(result: Message) -> None:
    """Print one JSON object on its own line, without buffering: for streams."""
    print(json.dumps(to_json(result)), flush=True)


def show_error(text: str, trace: str = "") -> None:
    """Print an error on stderr, below the traceback of the code that caused it."""
    for line in trace.splitlines():
        print(plain(line), file=sys.stderr)
    print(f"error: {plain(text)}", file=sys.stderr)


def to_json(result: Result) -> Any:
    """A message as protobuf's JSON, with the fields' own names; unset fields have their default values."""
    if isinstance(result, Message):
        return MessageToDict(result, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    if isinstance(result, Mapping):
        return dict(result)
    return [to_json(message) for message in result]
