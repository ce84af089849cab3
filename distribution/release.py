"""Makes the files of a release from the commit that is checked out: `make release`.

    python -m distribution.release [--out dist] [--no-demo]

Wheel and sdist are built twice, in two folders and from the commit's files alone; the bytes have to be equal. The wheel
is then installed in a new environment, and its demo runs there in an empty folder. Beside the two files are their
checksums and a bill of materials (CycloneDX).

The tag of the commit is the version: `v0.1.0` makes 0.1.0, which pyproject.toml and CHANGELOG.md must have too. A
commit without a tag makes a development version, with the number of commits and the commit's name.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from gzip import GzipFile
from pathlib import Path

from k8s.supply_chain import sbom

ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)


def version_of(tags: Sequence[str], pyproject: str, changelog: str) -> str:
    """The version of a commit, from its tags and its two files; without a tag, the version that is worked on.

    Stops with a sentence if they disagree.
    """
    own: str = tomllib.loads(pyproject)["project"]["version"]
    tagged = [tag.removeprefix("v") for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+\S*", tag)]
    if tagged not in ([], [own]):
        sys.exit(f"the commit has the tag v{', v'.join(tagged)}, and pyproject.toml {own}: change one of them")
    if tagged and f"\n## [{own}] - " not in changelog:
        sys.exit(f"CHANGELOG.md has no section '## [{own}] - DATE': move what is under [Unreleased] into it")
    return own


def version_of_head() -> str:
    """The version that HEAD makes."""
    tags = _git("tag", "--points-at", "HEAD", "v*").split()
    own = version_of(tags, _git("show", "HEAD:pyproject.toml"), _git("show", "HEAD:CHANGELOG.md"))
    return own if tags else f"{own}.dev{_git('rev-list', '--count', 'HEAD')}+g{_git('rev-parse', '--short', 'HEAD')}"


def build(version: str, folder: Path) -> list[Path]:
    """Build sdist and wheel of HEAD in a new folder. Returns their paths, by name."""
    source, out = folder / "source", folder / "out"
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)  # noqa: S607
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    project = source / "pyproject.toml"
    project.write_text(_VERSION.sub(f'version = "{version}"', project.read_text(), count=1))
    seconds = int(_git("log", "-1", "--format=%ct"))
    subprocess.run(  # noqa: S603 - this Python
        [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(seconds), "PYTHONHASHSEED": "0"},
        umask=0o022,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (sdist,) = out.glob("*.tar.gz")
    normalize(sdist, seconds)
    return sorted(out.iterdir())


def normalize(sdist: Path, seconds: int) -> None:
    """Write an sdist again, with its members in order, and without users, times of files and the time of the build."""
    with tarfile.open(sdist) as old:
        members = [
            (member, old.extractfile(member)) for member in sorted(old.getmembers(), key=lambda member: member.name)
        ]
        packed = io.BytesIO()
        with (
            GzipFile(filename="", fileobj=packed, mode="wb", mtime=seconds) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for member, content in members:
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                member.mtime, member.pax_headers = seconds, {}
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                new.addfile(member, content)
    sdist.write_bytes(packed.getvalue())


def require_equal(first: list[Path], second: list[Path]) -> None:
    """Stop with the names of files whose bytes differ."""
    if [path.name for path in first] != [path.name for path in second]:
        sys.exit(f"two builds made different files: {first}, {second}")
    if different := [one.name for one, other in zip(first, second, strict=True) if _digest(one) != _digest(other)]:
        sys.exit(f"two builds of one commit have different bytes: {', '.join(different)}")


def try_out(wheel: Path, version: str, folder: Path) -> None:
    """Install the wheel with the extra "demo" in a new environment, and run its demo in an empty folder."""
    environment, empty = folder / "environment", folder / "empty"
    venv.create(environment, with_pip=False)
    empty.mkdir(parents=True)
    _pip(environment / "bin" / "python", f"{wheel}[demo]")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FL_"))}
    fl = str(environment / "bin" / "fl")
    shown = subprocess.run([fl, "version"], cwd=empty, env=clean, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
    if f"impetus {version}," not in shown:
        sys.exit(f"expected version {version} of the installed wheel, got {shown}")
    demo = [fl, "demo", "--rounds", "3", "--clients", "4"]
    subprocess.run(demo, cwd=empty, env=clean, check=True)  # noqa: S603 - the wheel's own command


def bill(version: str) -> str:
    """The bill of materials of what runs, as JSON: the packages of all programs, in the tested versions."""
    made = sbom.here()
    made["metadata"]["component"]["version"] = version
    return json.dumps(made, indent=1) + "\n"


def main() -> None:
    """Make the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files, emptied first")
    parser.add_argument("--no-demo", action="store_true", help="do not install the wheel and run its demo")
    given = parser.parse_args()
    if changed := _git("status", "--porcelain"):
        sys.exit(
            f"expected no changes beside the commit, got:\n{changed}\nA release has what is committed: commit first"
        )
    version = version_of_head()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = build(version, folder / "first")
        require_equal(files, build(version, folder / "second, in another folder"))
        if not given.no_demo:
            try_out(next(path for path in files if path.suffix == ".whl"), version, folder / "installed")
        shutil.rmtree(given.out, ignore_errors=True)
        given.out.mkdir(parents=True)
        for file in files:
            shutil.copy(file, given.out)
    (given.out / f"impetus_fl-{version}.cdx.json").write_text(bill(version), encoding="utf-8")
    sums = "".join(f"{_digest(path)}  {path.name}\n" for path in sorted(given.out.iterdir()))
    (given.out / "SHA256SUMS").write_text(sums)
    print(
        f"two builds have the same bytes. {given.out}:", *sorted(path.name for path in given.out.iterdir()), sep="\n  "
    )


def _pip(python: Path, wanted: str) -> None:
    command = [sys.executable, "-P", "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), wanted], check=True)  # noqa: S603


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603, S607
    return done.stdout.strip()


if __name__ == "__main__":
    main()
