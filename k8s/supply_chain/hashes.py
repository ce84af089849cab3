"""Writes k8s/images/requirements: every package of the images with its version and the hashes of its files.

    python -m k8s.supply_chain.hashes [--cpu-index URL] [--all]

pip installs from these files with --require-hashes, so a package index or a proxy that delivers another file makes the
build fail. pip-compile resolves the versions of constraints.txt with pip's own settings and asks the index for the
hashes of all files of each version: all platforms, and sources. No file names an index. An entry that is there already
is kept, unless its version has changed or `--all` is given.

torch for CPUs is not in the public Python package index. Its hashes are those of the files for x86-64 and, if the index
has one, for 64-bit ARM, from the index given by --cpu-index or from pip's settings.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from k8s.supply_chain.closure import EXTRAS, ROOT, closure, runtime, wanted

FOLDER = ROOT / "k8s" / "images" / "requirements"
MACHINES = ("x86_64", "aarch64")
"""Kinds of processors, as wheels name them. The first one must be in the index."""
TOOLS = ("cyclonedx-bom",)
"""Programs of the build stage. They are in no image."""
_FOR_GPUS = re.compile(r"torch|torchvision|triton|nvidia-.*|cuda-.*")
_ENTRY = re.compile(r"^([\w.-]+)==(\S+) ((?:\\\n +--hash=sha256:[0-9a-f]{64} ?)+)", re.MULTILINE)

Entries = dict[str, str]
"""Canonical name -> the lines of a package in a requirements file."""


def entries(text: str) -> Entries:
    """The packages of a requirements file with hashes."""
    return {canonicalize_name(match[1]): match[0].rstrip() for match in _ENTRY.finditer(text)}


def compiled(requirements: Iterable[str]) -> Entries:
    """The requirements and all that they need, with versions of constraints.txt and the hashes of all their files."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "wanted.in"), Path(folder, "found.txt")
        source.write_text("\n".join(requirements))
        _run(
            *(sys.executable, "-P", "-m", "piptools", "compile", "--quiet", "--generate-hashes", "--allow-unsafe"),
            *("--no-header", "--no-annotate", "--strip-extras", "--no-emit-index-url", "--no-emit-trusted-host"),
            *("--no-emit-find-links", "--constraint", str(ROOT / "constraints.txt"), "--output-file", str(target)),
            str(source),
        )
        return entries(target.read_text())


def torch_for_cpus(version: str, index: str | None) -> str:
    """torch's build for CPUs, with the hash of the file for each machine for which the index has one."""
    hashes = []
    for machine in MACHINES:
        with tempfile.TemporaryDirectory() as folder:  # pip asks for a target with another platform, and writes none
            report = _run(
                *(sys.executable, "-P", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
                *("--no-deps", "--only-binary", ":all:", "--platform", f"manylinux_2_28_{machine}", "--target", folder),
                *("--report", "-", *(("--extra-index-url", index) if index else ()), f"torch==={version}+cpu"),
                may_fail=machine != MACHINES[0],
            )
        if not report:
            sys.stderr.write(f"{machine}: the index has no torch {version}+cpu, so no image for CPUs of this kind\n")
            continue
        (torch,) = json.loads(report)["install"]
        hashes.append(torch["download_info"]["archive_info"]["hashes"]["sha256"])
    return " \\\n    ".join([f"torch=={version}+cpu", *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])


def split(hashed: Entries) -> dict[str, Entries]:
    """The files by name: torch for GPUs, the packages of every image, what each extra adds, the tools of the build."""
    gpu = {name for name in hashed if _FOR_GPUS.fullmatch(name)} - {"nvidia-ml-py"}
    base = (closure(wanted()) | {"setuptools"}) - gpu
    names = {"torch-cuda": gpu, "packages": base, "tools": closure(TOOLS) - {"pip"}}
    for extra in EXTRAS:
        names[f"extra-{extra}"] = closure(wanted(extra)) - base
    return {file: {name: hashed[name] for name in sorted(names_of_file)} for file, names_of_file in names.items()}


def kept(pins: Mapping[str, str]) -> Entries:
    """The entries of the present files that have the versions of constraints.txt; CUDA's while torch is the same."""
    files = {path.stem: entries(path.read_text()) for path in FOLDER.glob("*.txt") if path.stem != "torch-cpu"}
    cuda = files.pop("torch-cuda", {})
    same = cuda.get("torch", "").startswith(f"torch==={pins['torch']} ")
    hashed = {name: lines for packages in files.values() for name, lines in packages.items()}
    hashed = {name: lines for name, lines in hashed.items() if lines.partition(" ")[0].endswith(f"=={pins[name]}")}
    return {**hashed, **(cuda if same else {})}


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-index", help="package index with torch's builds for CPUs")
    parser.add_argument("--all", action="store_true", help="renew the hashes of unchanged versions too")
    given = parser.parse_args()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins: dict[str, str] = {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)
    }
    hashed = {} if given.all else kept(pins)
    missing = (runtime() | closure(TOOLS) | {"setuptools"}) - {*hashed, "pip"}
    # "===" excludes local versions such as 2.13.0+cpu.
    hashed |= compiled(f"{name}=={'=' * (name == 'torch')}{pins[name]}" for name in missing) if missing else {}
    files = split(hashed)
    cpu = torch_for_cpus(pins["torch"], given.cpu_index)
    files["torch-cpu"] = {"torch": cpu, "torchvision": hashed["torchvision"]}
    FOLDER.mkdir(exist_ok=True)
    for name, packages in files.items():
        (FOLDER / f"{name}.txt").write_text(_HEADER + "\n".join(packages.values()) + "\n")


_HEADER = "# Generated by python -m k8s.supply_chain.hashes.\n"


def _run(*command: str, may_fail: bool = False) -> str:
    """Its output; empty if it failed and may."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - constants of this file
    if done.returncode and may_fail:
        return ""
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} failed with exit code {done.returncode}: see its message above")
    return done.stdout


if __name__ == "__main__":
    main()
