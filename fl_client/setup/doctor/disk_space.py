"""Checks the space for models, on the disk of the state directory and in memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from fl_client.setup.doctor.findings import Finding, fail, ok, size, warn
from fl_client.setup.doctor.state_directory import USER, nearest

ON_DISK = 4
"""Models on disk: an update, its next client state, the older state, and a file being written."""
IN_MEMORY = 6
"""Models in memory: the model, its bundle, gradients, a direction, a client state, and the update."""
_CGROUP = Path("/sys/fs/cgroup")


def on_disk(state_dir: Path, model_bytes: int) -> Finding:
    """Check the free space for the files of one run."""
    try:
        found = os.statvfs(nearest(state_dir.absolute()))
    except OSError as error:
        return fail("disk", f"expected to read the free space of {state_dir}, got {error}", USER)
    free, need = found.f_bavail * found.f_frsize, ON_DISK * model_bytes
    if found.f_files and not found.f_favail:
        return fail("disk", f"expected free inodes for {state_dir}, got none: df -i", "delete small files")
    return _compared("disk", free, need, f"free for {state_dir}", "free space, or set a state_dir on a larger disk")


def in_memory(device: torch.device, model_bytes: int) -> Iterator[Finding]:
    """Check the memory that is free now, while torch, the task and its data are loaded."""
    need = IN_MEMORY * model_bytes
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        yield _compared("gpu memory", free, need, f"free on {device}", "end other programs on the GPU: nvidia-smi")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    fix = "end other programs, add swap, or give the service more: fl-client unit --memory"
    yield _compared("memory", available_memory(), need, f"free in addition to the {size(peak)} of this check", fix)


def available_memory() -> int:
    """Free bytes by the kernel, and at most those that the control group allows."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text(encoding="utf-8") for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # an older control group, or no limit
        return free


def _compared(check: str, free: int, need: int, where: str, fix: str) -> Finding:
    """OK for twice the need, a warning for less, a failure for less than the need."""
    if free >= 2 * need:
        return ok(check, f"{size(free)} {where}, a run needs about {size(need)}")
    message = f"expected {size(2 * need)} {where}, twice the need of a run, got {size(free)}"
    return (fail if free < need else warn)(check, message, fix)
