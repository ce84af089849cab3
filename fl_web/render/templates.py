"""The templates, with the functions that they use. Every text is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from fl_web.curves.thinning import thinned
from fl_web.render import formats, states
from fl_web.render.spark import spark

STATIC = Path(__file__).parents[1] / "static"


def rendered(template: str, context: Mapping[str, Any]) -> str:
    """The text of a template."""
    return environment().get_template(template).render(context)


def load_templates() -> None:
    """Compile all templates, so that the first page does not wait for it."""
    for name in environment().list_templates():
        environment().get_template(name)


@cache
def environment() -> Environment:
    """The environment of all templates. A name that a view does not set is an error."""
    made = Environment(
        loader=PackageLoader("fl_web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    for name in formats.__all__:
        made.globals[name] = getattr(formats, name)
    made.filters["path"] = _path
    made.globals.update(
        run_word=states.run_word, client_word=states.client_word, tone=states.tone, event_tone=states.event_tone,
        spark=spark, static=static_address, sample=sample,
    )  # fmt: skip
    return made


def _path(text: str) -> str:
    """A text as a part of a path."""
    return quote(text, safe="")


def sample(rounds: list[Any], most: int) -> list[Any]:
    """At most so many of a list, evenly, with the first and the last, the newest first."""
    step = [float(index) for index in range(len(rounds))]
    return [rounds[index] for index in reversed(thinned(step, step, most))]


def static_address(name: str) -> str:
    """The address of a static file, with a part of its hash: a browser keeps it until it changes."""
    return f"/static/{name}?v={_digest(name)}"


@cache
def _digest(name: str) -> str:
    return sha256((STATIC / name).read_bytes()).hexdigest()[:12]
