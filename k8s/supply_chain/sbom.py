"""The bill of materials of an environment, in CycloneDX's JSON.

    python -m k8s.supply_chain.sbom build/sbom.cdx.json
    python -m k8s.supply_chain.sbom --environment /opt/impetus /opt/impetus/sbom.cdx.json

Without `--environment`: of what is installed here, without the tools of developers. With it: of all packages there, as
at the build of an image.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from k8s.supply_chain.closure import ROOT, runtime
from k8s.supply_chain.licences import licence

Bill = dict[str, Any]


def bill_of(python: Path) -> Bill:
    """The bill of all packages of this Python, without times, random numbers and addresses of package indexes."""
    done = subprocess.run(  # noqa: S603 - this Python, and a path of the command line
        [
            *(sys.executable, "-P", "-m", "cyclonedx_py", "environment", "--output-format", "JSON"),
            *("--output-reproducible", "--short-PURLs", "--mc-type", "application", "--no-validate"),
            *("--pyproject", str(ROOT / "pyproject.toml"), str(python)),
        ],
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        sys.exit(f"cyclonedx-py failed with exit code {done.returncode}: see its message above")
    bill: Bill = json.loads(done.stdout)
    return bill


def with_licences(bill: Bill, packages: dict[str, Distribution]) -> Bill:
    """The bill with the licences of older metadata too, which cyclonedx-py leaves out. packages: by canonical name."""
    components = [
        component if component.get("licenses") else {**component, "licenses": [{"license": {"name": licence(package)}}]}
        for component in bill["components"]
        for package in [packages[canonicalize_name(component["name"])]]
    ]
    return {**bill, "components": components}


def restricted(bill: Bill, names: set[str]) -> Bill:
    """The bill with these packages alone. names: canonical."""
    kept = [component for component in bill["components"] if canonicalize_name(component["name"]) in names]
    references = {component["bom-ref"] for component in (bill["metadata"]["component"], *kept)}
    dependencies = [
        {
            "ref": dependency["ref"],
            "dependsOn": [other for other in dependency.get("dependsOn", ()) if other in references],
        }
        for dependency in bill["dependencies"]
        if dependency["ref"] in references
    ]
    return {**bill, "components": kept, "dependencies": dependencies}


def here() -> Bill:
    """The bill of what this environment has for images."""
    return with_licences(restricted(bill_of(Path(sys.executable)), runtime()), _by_name(None))


def of_environment(folder: Path) -> Bill:
    """The bill of a virtual environment."""
    (packages,) = folder.glob("lib/python3*/site-packages")
    return with_licences(bill_of(folder / "bin" / "python"), _by_name(packages))


def _by_name(folder: Path | None) -> dict[str, Distribution]:
    installed = distributions() if folder is None else distributions(path=[str(folder)])
    return {canonicalize_name(package.name): package for package in installed}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="a virtual environment; the default is this one")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    bill = here() if given.environment is None else of_environment(given.environment)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    given.file.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
