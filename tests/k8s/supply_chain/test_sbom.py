"""The bill of materials: valid CycloneDX, complete, with a licence for each package, and without private addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from k8s.supply_chain import sbom
from k8s.supply_chain.closure import PROJECT, runtime
from tests.test_dependencies import pins

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bill() -> sbom.Bill:
    """The bill of this environment."""
    return sbom.here()


def test_it_is_valid(bill: sbom.Bill) -> None:
    """By the schema of its version."""
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415 - two seconds
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert bill["specVersion"] == "1.6"
    assert validator.validate_str(json.dumps(bill)) is None
    assert validator.validate_str(json.dumps({**bill, "components": [{"name": "x"}]})) is not None


def test_it_has_what_the_images_have(bill: sbom.Bill) -> None:
    """All run-time packages with their versions and no tool of developers; the main component is the project."""
    found = {
        canonicalize_name(component["name"]): component["version"].partition("+")[0] for component in bill["components"]
    }
    tested = pins()
    assert found == {name: tested[name] for name in runtime()}
    main = bill["metadata"]["component"]
    assert (main["name"], main["version"]) == (PROJECT["name"], PROJECT["version"])


def test_every_package_has_a_licence(bill: sbom.Bill) -> None:
    """Also those with older metadata."""
    assert [component["name"] for component in bill["components"] if not component.get("licenses")] == []


def test_it_names_no_place_of_this_machine(bill: sbom.Bill) -> None:
    """Neither folders nor a package index."""
    text = json.dumps(bill)
    assert "file:" not in text
    assert str(ROOT) not in text


def test_dependencies_refer_to_components(bill: sbom.Bill) -> None:
    """Each reference has its component."""
    known = {component["bom-ref"] for component in (bill["metadata"]["component"], *bill["components"])}
    dependencies: list[dict[str, Any]] = bill["dependencies"]
    assert {name for dependency in dependencies for name in (dependency["ref"], *dependency["dependsOn"])} <= known
