"""Installs this clone into .venv, editable, with one extra of pyproject.toml: what `make demo` and `make install` run.

    python3 distribution/install.py demo

uv installs if it is on the path, and pip if it is not or if uv fails, because pip's settings may name indexes that uv
does not know. Both take the versions of constraints.txt. An installation that was interrupted may have left half a
package, which neither of them repairs: the file .venv/installing is there meanwhile, and the next installation empties
.venv first. The standard library is enough for this program.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED = 130
_OF_INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX", "UV_FIND_LINKS")
"""Variables with which a site names its own indexes to uv."""
_TICK_SECONDS = 0.5
_TAIL_LINES = 25
_COLLECTING = re.compile(r"^Collecting ([\w.-]+)")
_DOWNLOADING = re.compile(r"^ +Downloading (\S+) \((.+)\)")
_INSTALLING = re.compile(r"^Installing collected packages: (.*)")


def main() -> int:
    """Install, and return the exit code."""
    parser = argparse.ArgumentParser(description="Installs this clone into .venv with one extra of pyproject.toml.")
    parser.add_argument("extra", help="for example demo, or dev for the tests too")
    extra = parser.parse_args().extra
    try:
        return install(ROOT / ".venv", extra)
    except KeyboardInterrupt:
        print("\ninterrupted: the next installation begins anew", file=sys.stderr)
        return INTERRUPTED


def install(folder: Path, extra: str) -> int:
    """Make the environment `folder` if it is not whole, and install. Returns the exit code."""
    marker = folder / "installing"
    if other := _other(marker):
        print(f"process {other} installs into {folder}: wait for its end", file=sys.stderr)
        return 1
    if not _is_whole(folder, marker):
        _empty(folder)
    marker.write_text(str(os.getpid()))
    began = time.monotonic()
    code = _install(folder, f"{ROOT}[{extra}]")
    if not code:
        marker.unlink()
        print(f"installed for {extra!r} in {time.monotonic() - began:.0f} s", flush=True)
    return code


def _install(folder: Path, wanted: str) -> int:
    uv, python = shutil.which("uv"), folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", flush=True)
        of_uv = ("venv", "--quiet", "--seed", "--allow-existing", "--python", sys.executable, str(folder))
        made = uv and not _run(uv, *of_uv)
        if not made and (code := _run(sys.executable, "-m", "venv", str(folder))):
            return code
    options = ("--constraint", str(ROOT / "constraints.txt"), "--editable", wanted)
    if uv:
        environment = dict(os.environ)
        if not any(name.startswith(_OF_INDEXES) for name in environment):
            # A machine without a GPU gets torch for CPUs, which is a tenth as large.
            environment.setdefault("UV_TORCH_BACKEND", "auto")
        if not _run(uv, "pip", "install", "--python", str(python), *options, environment=environment):
            return 0
        print("uv could not install: pip does it, with its own settings", flush=True)
    return _with_pip(python, options)


def _with_pip(python: Path, options: tuple[str, ...]) -> int:
    """Install with one line of progress, and all of pip's lines in a file. Returns the exit code."""
    log = python.parents[1] / "install.log"
    command = (str(python), "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *options)
    with log.open("wb") as output, log.open(encoding="utf-8", errors="replace") as lines:
        progress = Progress(lines)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603 - pip, of .venv
        while True:
            try:
                code = process.wait(_TICK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                progress.show()
        progress.end()
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        print(*tail, f"pip failed with exit code {code}; all of its lines are in {log}", sep="\n", file=sys.stderr)
        if not progress.installing:
            (python.parents[1] / "installing").unlink()  # nothing was changed
    return code


class Progress:
    """What pip does, from the lines that it wrote: one line on a terminal, now and then a line elsewhere."""

    def __init__(self, lines: TextIO, between_s: float = 15.0) -> None:
        """between_s: seconds between two lines where the output is no terminal."""
        self._lines, self._between = lines, between_s
        self._step = "starting pip"
        self._packages = 0
        self._began = self._shown = time.monotonic()
        self._tty = sys.stdout.isatty()
        self.installing = False
        """Whether pip has begun to change the environment."""

    def show(self) -> None:
        """Show the time and the latest step."""
        for line in self._lines:
            self._read(line)
        now = time.monotonic()
        text = f"{now - self._began:4.0f} s  {self._step}"
        if self._tty:
            print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif now - self._shown >= self._between:
            self._shown = now
            print(text, flush=True)

    def end(self) -> None:
        """Read the rest, and remove the line from a terminal."""
        for line in self._lines:
            self._read(line)
        if self._tty:
            print("\r\033[K", end="", flush=True)

    def _read(self, line: str) -> None:
        if match := _COLLECTING.match(line):
            self._packages += 1
            self._step = f"package {self._packages}: {match[1]}"
        elif match := _DOWNLOADING.match(line):
            self._step = f"package {self._packages}: downloading {match[1].rpartition('/')[2]} ({match[2]})"
        elif match := _INSTALLING.match(line):
            self._step, self.installing = f"installing {match[1].count(',') + 1} packages", True


def _other(marker: Path) -> int:
    """The number of the process that installs, or 0."""
    try:
        number = int(marker.read_text())
        os.kill(number, 0)
    except (OSError, ValueError):
        return 0
    return number


def _is_whole(folder: Path, marker: Path) -> bool:
    """Whether the environment can be installed into: of this version of Python, and not left by an interruption."""
    if marker.exists():
        print("the last installation was interrupted: .venv is made anew", flush=True)
        return False
    probe = "import sys, pip; print(*sys.version_info[:2], sep='.')"
    try:
        command = [str(folder / "bin" / "python"), "-c", probe]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - Python, of .venv
    except OSError:
        return False
    return done.stdout.strip() == f"{sys.version_info[0]}.{sys.version_info[1]}"


def _empty(folder: Path) -> None:
    """Make the folder, or remove what is in it; a link to a folder stays."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _run(*command: str, environment: dict[str, str] | None = None) -> int:
    return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - uv, or this Python


if __name__ == "__main__":
    sys.exit(main())
