"""A separate booted system: systemd as the first process of new namespaces, over a copy of this machine.

The machine's files lie below an overlay in memory, so nothing that happens in there is left behind; the network is the
machine's own. Wants root, and control groups of version 1 that it may make.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Self

from tests.processes.process import TIMEOUT_S, eventually

ROOT = Path(__file__).parents[3]
CGROUPS = Path("/sys/fs/cgroup")
SYSTEMD = Path("/lib/systemd/systemd")
HOME = "/opt/impetus"
"""Path of the programs in the booted system."""
_NAME = f"impetus-test-{os.getpid()}"

_BOOT = f"""
set -e
R=$1/root
mount -t tmpfs tmpfs $1
mkdir -p $1/upper $1/work $R
cp -r $2/. $1/upper
mount -t overlay overlay -o lowerdir=/,upperdir=$1/upper,workdir=$1/work $R
mkdir -p $R{HOME}/python $R{HOME}/packages $R{HOME}/source
mount --bind {sys.base_prefix} $R{HOME}/python
mount --bind $3 $R{HOME}/packages
mount --bind {ROOT} $R{HOME}/source
for each in python packages source; do mount -o remount,ro,bind $R{HOME}/$each; done
mount -t proc proc $R/proc
mount --rbind /sys $R/sys
mount -t tmpfs tmpfs $R/sys/fs/cgroup
for each in cpu cpuacct cpuset memory devices freezer blkio pids; do
    mkdir $R/sys/fs/cgroup/$each
    mount -t cgroup -o $each cgroup $R/sys/fs/cgroup/$each
done
mkdir $R/sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup $R/sys/fs/cgroup/systemd
for each in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs $R/$each; done
for each in null zero full random urandom tty; do touch $R/dev/$each; mount --bind /dev/$each $R/dev/$each; done
mkdir $R/dev/shm $R/dev/pts
mount -t devpts -o newinstance,ptmxmode=0666 devpts $R/dev/pts
ln -s pts/ptmx $R/dev/ptmx
cd $R
mkdir old
# Not chroot: systemd makes namespaces for its services, which start at a real root.
pivot_root . old
umount --lazy old
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin {SYSTEMD} --system --unit=basic.target --show-status=no
"""

_PROGRAM = f"""#!/bin/sh
export PYTHONPATH={HOME}/source:{HOME}/packages LD_LIBRARY_PATH={HOME}/python/lib PYTHONDONTWRITEBYTECODE=1
exec {HOME}/python/bin/python3 -c 'import sys; sys.argv[0] = "{HOME}/bin/NAME"
from MODULE.__main__ import main; sys.exit(main())' "$@"
"""


def why_not() -> str:
    """The reason why no system can be booted here; empty if one can."""
    if os.geteuid() != 0:
        return "only root boots a system"
    if missing := [name for name in ("unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed"
    if not SYSTEMD.exists():
        return "systemd is not installed: apt-get install systemd"
    if not (CGROUPS / "systemd").is_dir() or not os.access(CGROUPS / "systemd", os.W_OK):
        return "control groups of version 1 are not here, or may not be made"
    return ""


class Booted:
    """A booted system with this machine's files and some more; it is removed at the end."""

    def __init__(self, folder: Path, files: Path) -> None:
        """files: path -> content of files that replace the machine's own; the programs are added."""
        programs = files / HOME.removeprefix("/") / "bin"
        programs.mkdir(parents=True)
        for name, module in (("fl-client", "fl_client"), ("fl-server", "fl_server")):
            (programs / name).write_text(_PROGRAM.replace("NAME", name).replace("MODULE", module))
            (programs / name).chmod(0o755)
        self._workspace = folder / "system"
        self._workspace.mkdir()
        self._log = (folder / "boot.log").open("wb")
        self._groups = [group / _NAME for group in CGROUPS.iterdir() if group.is_dir() and not group.is_symlink()]
        for group in self._groups:
            group.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (group / name).exists():
                    (group / name).write_text((group.parent / name).read_text())
        enter = "".join(f"echo $$ > {group}/cgroup.procs\n" for group in self._groups)
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        inner = ["unshare", "-mpiuC", "--propagation", "private", "--fork", "--kill-child", "bash", "-c", _BOOT, "boot"]
        self._outer = subprocess.Popen(
            ["bash", "-c", f'{enter}exec "$@"', "enter", *inner, str(self._workspace), str(files), packages],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Self:
        eventually(lambda: self.run("systemctl", "is-active", "basic.target").stdout == "active\n", "the system is up")
        return self

    def __exit__(self, *_: object) -> None:
        """End its first process, and with it all others."""
        self._outer.kill()
        self._outer.wait(TIMEOUT_S)
        self._log.close()
        for group in self._groups:
            eventually(partial(self._removed, group), f"{group} is empty")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the system as root."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        if not children:
            return subprocess.CompletedProcess(command, 1, "", "not up yet")
        enter = ["nsenter", "-t", children[0], "-m", "-p", "-C", "-u", "-i"]
        return subprocess.run([*enter, *command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        output = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names)).stdout
        return dict(line.split("=", 1) for line in output.splitlines())

    def report(self, unit: str) -> str:
        """The status and journal of a unit, for the report of a failed test."""
        status = self.run("systemctl", "status", "--no-pager", "--lines=0", unit).stdout
        return status + self.run("journalctl", "--no-pager", "--lines=40", f"--unit={unit}").stdout

    @staticmethod
    def _removed(group: Path) -> bool:
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        except OSError:
            return False
        return True
