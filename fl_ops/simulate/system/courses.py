"""The times of one assignment: download, local work, upload, and where it ends early."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fl_ops.simulate.system.devices import Device


@dataclass(frozen=True, slots=True)
class Amount:
    """What a client has to do for an assignment."""

    bytes_down: int
    """Tensor bytes that it does not hold."""
    gradients: int
    """Number of examples of all local batches; an example of which two gradients are taken counts twice."""
    bytes_up: int


@dataclass(frozen=True, slots=True)
class Course:
    """When one client does what for an assignment, in seconds since the start of the run."""

    client: str
    amount: Amount
    begins: float
    """The assignment reaches the client, the latency included."""
    downloaded: float
    trained: float
    finished: float
    """The server has the whole upload."""
    ends: float
    """The server has the upload, or notices that the client is gone."""
    delivers: bool = True
    """Whether the client finishes."""

    def ended(self, at: float) -> Course:
        """The course if the client is gone at a time; the same if it has finished by then."""
        return self if self.finished <= at else replace(self, ends=min(at, self.ends), delivers=False)

    def transferred(self, now: float) -> tuple[int, int]:
        """Bytes (down, up) until `now`; a transfer that is under way has come as far as its time."""
        until = min(now, self.ends)
        down, up = self.amount.bytes_down, self.amount.bytes_up
        return _share(down, self.begins, self.downloaded, until), _share(up, self.trained, self.finished, until)


def course(client: str, device: Device, amount: Amount, assigned: float) -> Course:
    """The course of an assignment that nothing interrupts.

    assigned: when the client gets to it, in seconds since the start of the run.
    """
    begins = assigned + device.latency_s
    downloaded = begins + amount.bytes_down / device.down
    trained = downloaded + amount.gradients / device.speed
    finished = trained + amount.bytes_up / device.up
    return Course(client, amount, begins, downloaded, trained, finished, finished)


def _share(size: int, begin: float, end: float, now: float) -> int:
    if now >= end:
        return size
    return int(size * (now - begin) / (end - begin)) if now > begin else 0
