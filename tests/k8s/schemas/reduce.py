"""Convert a published CustomResourceDefinition to a small strict JSON schema of one version, on stdout.

    python -m tests.k8s.schemas.reduce CRD.yaml VERSION "PROJECT TAG PATH"

Descriptions and Kubernetes' own extensions are removed. The types of fields stay. Unlisted fields are forbidden,
because the API server drops them silently.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

_OPEN = "x-kubernetes-preserve-unknown-fields"
_NAMES = ("properties", "patternProperties", "definitions")
"""Keywords with arbitrary names as keys."""
_CHOICES = ("allOf", "anyOf", "oneOf", "not")


def strict(schema: Any, *, close: bool = True) -> Any:
    """The schema without descriptions, closed to unknown fields if `close`; alternatives stay open."""
    if isinstance(schema, list):
        return [strict(part, close=close) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: _strict_under(key, value, close)
        for key, value in schema.items()
        if key not in {"description", "default", "example"} and not key.startswith("x-kubernetes-")
    }
    if close and "properties" in kept and "additionalProperties" not in kept and not schema.get(_OPEN):
        kept["additionalProperties"] = False
    return kept


def _strict_under(key: str, value: Any, close: bool) -> Any:
    if key in _NAMES:
        return {name: strict(part, close=close) for name, part in value.items()}
    if key == "pattern":
        # Go takes a flag anywhere, Python at the beginning.
        return re.sub(r"^\^\(\?i\)", "(?i)^", value)
    return strict(value, close=close and key not in _CHOICES)


def reduce(crd: dict[str, Any], version: str) -> dict[str, Any]:
    """The strict schema of a served version of a CRD."""
    found = next(served for served in crd["spec"]["versions"] if served["name"] == version and served["served"])
    schema: dict[str, Any] = strict(found["schema"]["openAPIV3Schema"])
    schema["properties"]["apiVersion"] = {"const": f"{crd['spec']['group']}/{version}"}
    schema["properties"]["kind"] = {"const": crd["spec"]["names"]["kind"]}
    return schema


if __name__ == "__main__":
    path, version, source = sys.argv[1:]
    whole = {"$comment": f"From {source}, Apache-2.0."} | reduce(yaml.safe_load(Path(path).read_text()), version)
    json.dump(whole, sys.stdout, separators=(",", ":"))
    sys.stdout.write("\n")
