"""Checks of the training device: CUDA, sensors of the gates, a step of training, and space for the model."""

from __future__ import annotations

import math
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fl_client.errors import ConfigError, DeviceError, StartError, StateError
from fl_client.gates.conditions import HostState, make_gates
from fl_client.gates.gate_set import Gate, SensorError
from fl_client.settings import device as devices
from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.files import USER, nearest
from fl_client.setup.doctor.findings import Finding, fail, ok, warn
from fl_client.storage.state import StateDir, shard_file
from fl_client.training.data import LocalTask, load_local_task
from fl_client.training.local_model import trial_step
from fl_common.units import counted, size
from fl_tasks.errors import TaskError
from fl_tasks.new_model import new_model

_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap", "/dev/nvhost-ctrl", "/dev/nvgpu")
_TEGRA = Path("/etc/nv_tegra_release")
_JETSON = "install the torch of NVIDIA's JetPack for this board, see docs/devices/jetson.md"
_PC = "install a torch that is built for CUDA: https://pytorch.org/get-started"


def check(config: ClientConfig) -> list[Finding]:
    """Check the device, an unused GPU, and more threads than cores."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            device = devices.choose(config.device)
        except DeviceError as error:
            why = _no_cuda()
            return [fail("device", str(error), _fix(why) if why else "")]
        except RuntimeError as error:  # from torch, where the driver fails
            return [fail("device", f"expected {config.device}, got: {error}", _fix(str(error)))]
    findings = [ok("device", _described(device))]
    nodes = [node for node in _NODES if Path(node).exists()]
    if device.type == "cpu" and config.device == "auto" and nodes:
        why = _no_cuda() or "; ".join(str(warning.message) for warning in caught)
        findings = [warn("device", f"expected CUDA because of {nodes[0]}, got the CPU: {why}", _fix(why)), *findings]
    cores = len(os.sched_getaffinity(0))
    if config.threads > cores:
        message = f"expected at most {counted(cores, 'thread')}, one per core, got threads = {config.threads}"
        findings.append(warn("device", message, f"set threads = {cores}"))
    return findings


def _described(device: torch.device) -> str:
    about = devices.describe(device)
    built = f"torch {torch.__version__}"
    cores = f", {len(os.sched_getaffinity(0))} cores" if device.type == "cpu" else f", CUDA {torch.version.cuda}"
    return f"{about.kind}: {about.name}{cores}, {size(about.memory_bytes)}, {built}"


def _no_cuda() -> str:
    """The reason why torch has no CUDA, as torch or the driver reports it."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return ""


def _fix(why: str) -> str:
    if "without CUDA" in why:
        return _JETSON if _TEGRA.exists() else _PC
    if "driver" in why:
        return "nvidia-smi must work first: install or upgrade the driver, and reboot the device"
    return "check the permissions: ls -l /dev/nvidia* /dev/nvmap; a Jetson's nodes need the groups video and render"


def check_gates(config: ClientConfig, device: torch.device) -> Iterator[Finding]:
    """One finding for each gate. A closed gate is no failure."""
    host = HostState(device, idle_for=lambda: math.inf, clock=time.time)
    try:
        gates = make_gates(config.gates, host)
    except ConfigError as error:
        yield fail("gates", str(error))
        return
    yield from map(_checked, gates)


def _checked(gate: Gate) -> Finding:
    try:
        reading = gate.check()
    except SensorError as error:
        return fail(
            "gates", f"{gate.name}: {error}", "run this as the service's user: sudo -u impetus fl-client doctor"
        )
    if reading is None or reading.open:
        return ok("gates", f"{gate.name} is open")
    return ok("gates", f"{gate.name} is closed now: {reading.detail}")


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The findings, and what other checks need."""

    findings: list[Finding]
    device: torch.device
    model_bytes: int | None = None
    """Size of the model's state. None where there is no model."""


class _ReadOnlyShard:
    """Reads the shard of a state directory, and writes nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shard(
        self, configured: dict[str, Any], make: Callable[[], list[int] | None], title: str = ""
    ) -> list[int] | None:
        """See StateDir.shard."""
        if (self._folder / shard_file(title)).exists():
            return StateDir(self._folder).shard(configured, make, title)
        return make()


def check_training_steps(config: ClientConfig) -> TrialResult:
    """Load each task and its data, and train on one batch as a daemon does. Its size is that of the largest model."""
    device = devices.choose(config.device)
    torch.set_num_threads(config.threads)
    trials = [_trial(config, number, device) for number in range(len(config.served))]
    sizes = [trial.model_bytes for trial in trials if trial.model_bytes is not None]
    return TrialResult([it for trial in trials for it in trial.findings], device, max(sizes, default=None))


def _trial(config: ClientConfig, number: int, device: torch.device) -> TrialResult:
    if (served := config.served[number]).package:
        message = f"{served.title}: its code comes as the package {served.package}; `fl-client packages list` shows it"
        return TrialResult([ok("task", message)], device)
    try:
        local = load_local_task(config, _ReadOnlyShard(config.state_dir), device, number)
    except StateError as error:
        return TrialResult([fail("shard", str(error))], device)
    except (ConfigError, StartError, OSError) as error:
        return TrialResult([fail("task", str(error), _WHERE)], device)
    except RuntimeError as error:
        return TrialResult([fail("task", f"expected its data on {device}, got: {_first_line(error)}", _KERNEL)], device)
    own = f" in {counted(local.train.own_batches, 'batch', 'batches')}" if local.train.own_batches else ""
    data = (
        f"{local.title}: {counted(len(local.train), 'example')}{own} to train on, {len(local.held_out)} to evaluate on"
    )
    return _step(config, local, ok("task", data))


def _step(config: ClientConfig, local: LocalTask, loaded: Finding) -> TrialResult:
    device = local.device
    try:
        torch.manual_seed(0)
        model = devices.Compute(config.precision, config.memory_format).prepared(new_model(local.task), device)
        trial = trial_step(local.task, local.train, model, device)
    except TaskError as error:
        return TrialResult([loaded, fail("step", str(error))], device)
    except Exception as error:  # noqa: BLE001 - any error of the task's code or the driver is a finding
        message = f"expected a step of training on {device}, got: {_first_line(error)}"
        return TrialResult([loaded, fail("step", message, _KERNEL)], device)
    took = 1000 * trial.seconds
    message = (
        f"a model of {size(trial.model_bytes)}; the first batch of {trial.examples} took {took:.0f} ms on {device}"
    )
    if math.isfinite(trial.loss):
        return TrialResult([loaded, ok("step", message)], device, trial.model_bytes)
    odd = warn("step", f"expected a finite loss of the first batch, got {trial.loss}", "check the data, and precision")
    return TrialResult([loaded, odd], device, trial.model_bytes)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


_WHERE = "relative paths are relative to the daemon's working directory: /var/lib/impetus as a service"
_KERNEL = (
    "'no kernel image': torch is not built for this GPU, so install another torch, or set device = \"cpu\";"
    " 'out of memory': another program uses it; otherwise it is the task's code"
)


ON_DISK = 4
"""Models on disk: an update, its next client state, the older state, and a file being written."""
IN_MEMORY = 6
"""Models in memory: the model, its bundle, gradients, a direction, a client state, and the update."""
_CGROUP = Path("/sys/fs/cgroup")


def on_disk(state_dir: Path, model_bytes: int) -> Finding:
    """Check the free space for the files of one run."""
    try:
        filesystem = os.statvfs(nearest(state_dir.absolute()))
    except OSError as error:
        return fail("disk", f"expected to read the free space of {state_dir}, got {error}", USER)
    free, need = filesystem.f_bavail * filesystem.f_frsize, ON_DISK * model_bytes
    if filesystem.f_files and not filesystem.f_favail:
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
