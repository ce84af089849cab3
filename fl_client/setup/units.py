"""The files of the daemon's systemd service: their text and their paths."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fl_client.errors import UsageError

PROGRAM = "/opt/impetus/bin/fl-client"
"""Path of the program in the packaged unit."""
CONFIG = "/etc/impetus/client.toml"
"""Path of the settings in the packaged unit."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - paths that are refused
"""Directories that the unit hides from the daemon, by ProtectHome and PrivateTmp."""
FIRST_WITH_BACKOFF = 254
"""First version of systemd with RestartSteps."""

_UNIT = Path("etc/systemd/system/fl-client.service")
_DROP_INS = Path(f"{_UNIT}.d")


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Options of a unit."""

    program: Path
    """Path of fl-client on this device."""
    config: Path = Path(CONFIG)
    cuda: bool = False
    cores: float | None = None
    """CPU cores that the daemon may use. None: the unit's own limit."""
    memory: str | None = None
    """Memory that the daemon may use, in systemd's form: "4G", "60%". None: the unit's own limit."""


def unit_files(options: UnitOptions, systemd: int) -> dict[Path, str]:
    """Texts by their paths below the root directory, for a version of systemd.

    Raises:
        UsageError: the unit hides the program or the settings from the daemon, or a limit is not valid.
    """
    for what, path in (("program", options.program), ("settings", options.config)):
        _check_visible(what, path)
    unit = _packaged("fl-client.service").replace(PROGRAM, str(options.program)).replace(CONFIG, str(options.config))
    files = {_UNIT: unit, Path("etc/sysusers.d/impetus.conf"): _packaged("impetus.conf")}
    if options.cuda:
        files[_DROP_INS / "10-cuda.conf"] = _packaged("cuda.conf")
    if systemd >= FIRST_WITH_BACKOFF:
        files[_DROP_INS / "10-backoff.conf"] = _packaged("backoff.conf")
    if limits := _limits(options):
        files[_DROP_INS / "20-limits.conf"] = limits
    return files


def write(files: dict[Path, str], root: Path) -> None:
    """Write the files, and remove this program's earlier drop-ins that are not among them.

    Raises:
        UsageError: a file cannot be written.
    """
    stale = {_DROP_INS / f"{name}.conf" for name in ("10-cuda", "10-backoff", "20-limits")} - files.keys()
    try:
        for path in stale:
            (root / path).unlink(missing_ok=True)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}; run this as root, with sudo") from None


def systemd_version() -> int:
    """The version of the installed systemd. 0 without one."""
    try:
        output = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S607 - found by PATH
    except OSError:
        return 0
    version = re.match(r"systemd (\d+)", output)
    return int(version[1]) if version else 0


def _packaged(name: str) -> str:
    return (resources.files("fl_client") / "systemd" / name).read_text(encoding="utf-8")


def _check_visible(what: str, path: Path) -> None:
    if not path.is_absolute() or re.search(r"[\s%\"'\\$]", str(path)):
        raise UsageError(f"expected an absolute path without blanks and quotes for the {what}, got {path}")
    if hidden := next((folder for folder in HIDDEN if path.is_relative_to(folder)), None):
        raise UsageError(
            f"the service cannot access {hidden}, so it cannot read the {what} {path}: use another place, such as"
            f" {PROGRAM if what == 'program' else CONFIG}"
        )


def _limits(options: UnitOptions) -> str:
    lines = []
    if options.cores is not None:
        lines.append(f"CPUQuota={options.cores * 100:g}%")
    if options.memory is not None:
        if not re.fullmatch(r"\d+(K|M|G|T|%)", options.memory):
            raise UsageError(f'expected memory such as "4G" or "60%", got "{options.memory}"')
        # No throttling below the limit, which may be lower than the unit's MemoryHigh.
        lines += ["MemoryHigh=infinity", f"MemoryMax={options.memory}"]
    return "\n".join(["# Made by `fl-client unit`.", "[Service]", *lines, ""]) if lines else ""
