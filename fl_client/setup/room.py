"""Room for models: on the disk of the state directory, and in memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from fl_client.setup.findings import Finding, fail, ok, size, warn
from fl_client.setup.state_place import USER, nearest

ON_DISK = 4
"""Models on disk: an update with the client state that it would leave, the older state, and one half written."""
IN_MEMORY = 6
"""Models in memory: the model, what came for it, gradients, a direction, a state, and the update."""
_CGROUP = Path("/sys/fs/cgroup")


def on_disk(state_dir: Path, model_bytes: int) -> Finding:
    """Free space for what one run keeps."""
    try:
        found = os.statvfs(nearest(state_dir.absolute()))
    except OSError as error:
        return fail("disk", f"expected to see how much room there is for {state_dir}, got {error}", USER)
    free, need = found.f_bavail * found.f_frsize, ON_DISK * model_bytes
    if found.f_files and not found.f_favail:
        return fail("disk", f"expected room for files in {state_dir}, got no free inode: df -i", "delete small files")
    return _compared("disk", free, need, f"free for {state_dir}", "free some, or name a state_dir on a larger disk")


def in_memory(device: torch.device, model_bytes: int) -> Iterator[Finding]:
    """Memory that is left with torch, the task and its data loaded, as they are now."""
    need = IN_MEMORY * model_bytes
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        yield _compared("gpu memory", free, need, f"free on {device}", "end what else uses the GPU: nvidia-smi")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mend = "end other programs, add swap, or give the service more: fl-client unit --memory"
    yield _compared("memory", available_memory(), need, f"free beside the {size(peak)} that this look took", mend)


def available_memory() -> int:
    """Bytes that a program can have: what the kernel says, and no more than the control group allows."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text(encoding="utf-8") for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # an older control group, or no limit
        return free


def _compared(check: str, free: int, need: int, where: str, mend: str) -> Finding:
    """Twice what is needed is well, less is a warning, less than needed a fault."""
    if free >= 2 * need:
        return ok(check, f"{size(free)} {where}, a run needs about {size(need)}")
    said = f"expected {size(2 * need)} {where}, to have twice what a run needs, got {size(free)}"
    return (fail if free < need else warn)(check, said, mend)
