"""Published schemas are made strict: what they do not know is refused, what they leave open stays open."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.schemas.reduce import reduce, strict
from tests.k8s.schemas.validation import NEWEST

FILES = sorted(Path(__file__).parent.glob("schemas/*.json"))


@pytest.fixture(scope="module")
def draft() -> Any:
    """The validator of schemas. Its import takes two seconds, which the collection of each worker would take."""
    return pytest.importorskip("jsonschema").Draft202012Validator


def test_the_newest_kubernetes_has_schemas() -> None:
    """The package's version is that of its newest schemas."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package warns about its old dependencies
        import kubernetes_validate  # noqa: PLC0415
    assert kubernetes_validate.latest_version().startswith(f"{NEWEST}.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_schema_is_valid_and_names_its_source(draft: Any, path: Path) -> None:
    """Project, version and path; closed at the top."""
    schema = json.loads(path.read_text())
    draft.check_schema(schema)
    assert schema["$comment"].startswith("From ")
    assert " v" in schema["$comment"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["kind"]["const"].lower() == path.stem


def test_descriptions_are_removed_from_schemas() -> None:
    """A description is left out, a field that is called description is not."""
    schema = {"description": "d", "properties": {"description": {"type": "string", "description": "d"}}}
    assert strict(schema) == {"properties": {"description": {"type": "string"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {}, "x-kubernetes-preserve-unknown-fields": True},
        {"type": "object"},
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"additionalProperties": {"type": "string"}},
    ],
    ids=["asked-for", "nothing-listed", "a-choice", "a-map"],
)
def test_a_schema_stays_open_where_it_is_open(draft: Any, schema: Any) -> None:
    """Unknown fields are refused only where fields are listed, and all of them."""
    assert draft(strict(schema)).is_valid({"a": "x", "c": "y"})


def test_a_version_of_a_definition_is_taken() -> None:
    """Group, version and kind are fixed, and the status of a version that is not served is none."""
    version = {"name": "v1", "served": True, "schema": {"openAPIV3Schema": {"properties": {"spec": {}}}}}
    crd = {"spec": {"group": "g.io", "names": {"kind": "Thing"}, "versions": [version]}}
    assert reduce(crd, "v1")["properties"]["apiVersion"] == {"const": "g.io/v1"}
    version["served"] = False
    with pytest.raises(StopIteration):
        reduce(crd, "v1")
