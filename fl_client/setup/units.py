"""The daemon as a service of systemd: which files, with which text, and where they go."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fl_client.setup.errors import Misused

PROGRAM = "/opt/impetus/bin/fl-client"
"""Where the unit that comes along says that the program lies."""
CONFIG = "/etc/impetus/client.toml"
"""Where it says that the settings lie."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - named to be refused
"""What the unit does not let the daemon see: ProtectHome and PrivateTmp."""
FIRST_WITH_BACKOFF = 254
"""The systemd that knows RestartSteps."""

_UNIT = Path("etc/systemd/system/fl-client.service")
_DROP_INS = Path(f"{_UNIT}.d")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a unit is made for."""

    program: Path
    """fl-client, as it is installed on this device."""
    config: Path = Path(CONFIG)
    cuda: bool = False
    cores: float | None = None
    """Cores that the daemon may use. None: as the unit says."""
    memory: str | None = None
    """What it may use of memory, as systemd writes it: "4G", "60%". None: as the unit says."""


def unit_files(wishes: Wishes, systemd: int) -> dict[Path, str]:
    """Texts by their paths below the root directory, for a version of systemd.

    Raises:
        Misused: systemd would not let the daemon see its program or its settings, or a limit is none.
    """
    for what, path in (("program", wishes.program), ("settings", wishes.config)):
        _check_visible(what, path)
    unit = _packaged("fl-client.service").replace(PROGRAM, str(wishes.program)).replace(CONFIG, str(wishes.config))
    files = {_UNIT: unit, Path("etc/sysusers.d/impetus.conf"): _packaged("impetus.conf")}
    if wishes.cuda:
        files[_DROP_INS / "10-cuda.conf"] = _packaged("cuda.conf")
    if systemd >= FIRST_WITH_BACKOFF:
        files[_DROP_INS / "10-backoff.conf"] = _packaged("backoff.conf")
    if limits := _limits(wishes):
        files[_DROP_INS / "20-limits.conf"] = limits
    return files


def write(files: dict[Path, str], root: Path) -> None:
    """Put the files in place; drop-ins of ours that were there before and are not among them go.

    Raises:
        Misused: it is not allowed.
    """
    stale = {_DROP_INS / f"{name}.conf" for name in ("10-cuda", "10-backoff", "20-limits")} - files.keys()
    try:
        for path in stale:
            (root / path).unlink(missing_ok=True)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Misused(f"{error.filename} cannot be written: {error.strerror}; run this as root, with sudo") from None


def systemd_version() -> int:
    """The version of the systemd that is installed here, 0 without one."""
    try:
        told = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S607
    except OSError:
        return 0
    found = re.match(r"systemd (\d+)", told)
    return int(found[1]) if found else 0


def _packaged(name: str) -> str:
    return (resources.files("fl_client") / "systemd" / name).read_text(encoding="utf-8")


def _check_visible(what: str, path: Path) -> None:
    if not path.is_absolute() or re.search(r"[\s%\"'\\$]", str(path)):
        raise Misused(f"expected an absolute path without blanks and quotes to the {what}, got {path}")
    if hidden := next((each for each in HIDDEN if path.is_relative_to(each)), None):
        raise Misused(
            f"the {what} {path} would not be seen by the service, which has no {hidden}: put it elsewhere, such as"
            f" {PROGRAM if what == 'program' else CONFIG}"
        )


def _limits(wishes: Wishes) -> str:
    lines = []
    if wishes.cores is not None:
        lines.append(f"CPUQuota={wishes.cores * 100:g}%")
    if wishes.memory is not None:
        if not re.fullmatch(r"\d+(K|M|G|T|%)", wishes.memory):
            raise Misused(f'expected memory such as "4G" or "60%", got "{wishes.memory}"')
        # Slowed down nowhere below the limit, which may be under what the unit says.
        lines += ["MemoryHigh=infinity", f"MemoryMax={wishes.memory}"]
    return "\n".join(["# Made by `fl-client unit`.", "[Service]", *lines, ""]) if lines else ""
