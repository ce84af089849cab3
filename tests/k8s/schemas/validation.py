"""Whether an object fits the schema of its kind: Kubernetes' own, or that of a definition in this folder."""

from __future__ import annotations

import functools
import json
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMAS = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): schema
    for schema in (json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("*.json")))
}


OLDEST, NEWEST = "1.30", metadata.version("kubernetes-validate").rpartition(".")[0]
"""Versions of Kubernetes: the oldest one of README.md, and the newest one with schemas here."""


@functools.cache
def _refusal(text: str, version: str) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package warns about its old dependencies
        import jsonschema  # noqa: PLC0415 - two seconds, which the collection of each worker would take
        import kubernetes_validate  # noqa: PLC0415
    thing = json.loads(text)
    if schema := SCHEMAS.get((thing["apiVersion"], thing["kind"])):
        found = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(thing))
        return found and str(found)
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return None


def refusal(thing: dict[str, Any], version: str = NEWEST) -> str | None:
    """A schema's objection to an object; None if it is valid. Most objects are in several kustomizations."""
    return _refusal(json.dumps(thing), version)
