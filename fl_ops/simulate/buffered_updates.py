"""The updates of a simulated run with a buffer: under way, and in the buffer.

A client is trained when it is drawn, because the bundles of its version are the latest ones then. Its update is
admitted when it arrives, by the rules of that moment. So nothing old is loaded again, and the bits are a coordinator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fl_ops.simulate.engines.engine import Failed, Trained
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.traffic import Names
from fl_ops.simulate.updates import Contribution, NotDelivered
from fl_server.admission.norms import NormHistory
from fl_server.aggregation.snapshot import Snapshot
from fl_server.run.assignments import RoundPosition


@dataclass(frozen=True, slots=True)
class _Work:
    """What a client has done, and not delivered yet."""

    version: int
    done: Trained | Failed
    bundles: Names
    """The bundles that it was sent."""
    bytes_down: int
    """What it had to fetch for that."""


class BufferedUpdates:
    """Updates by client and version. `federation` has the models."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        """folder: for the files of the updates; it is made."""
        self._federation, self._folder = federation, folder
        folder.mkdir()
        self._work: dict[str, _Work] = {}
        self._buffer: dict[tuple[str, int], Contribution] = {}
        self._snapshots: dict[int, Snapshot] = {}
        """The models of the versions in use."""

    def begin(self, place: RoundPosition, clients: Sequence[str]) -> None:
        """These clients begin from the latest model. What they had to do before is dropped."""
        self.drop(clients)
        federation = self._federation
        self._snapshots[place.round] = federation.snapshot
        names, traffic = federation.bundles.names, federation.traffic
        for done in federation.trained(place, clients):
            if not isinstance(done, Trained | Failed):
                raise TypeError("expected clients that train one at a time in a run with a buffer")
            kept = done if isinstance(done, Failed) else self._kept(done, place.round)
            self._work[done.client] = _Work(place.round, kept, names, traffic.missing(done.client, names))

    def _kept(self, done: Trained, version: int) -> Trained:
        """The update in a file of its own: the client's next one does not replace it."""
        path = done.update.rename(self._folder / f"{version}-{done.client}")
        return replace(done, update=path, content=None)

    def drop(self, clients: Iterable[str]) -> None:
        """The work of these clients comes to nothing, if they have any."""
        for client in clients:
            work = self._work.pop(client, None)
            if work is not None and isinstance(work.done, Trained):
                work.done.update.unlink()

    def arrive(self, client: str, norms: NormHistory | None = None) -> Contribution | NotDelivered:
        """What became of a client's work, which is in the buffer now if it was admitted. norms: as in `admitted`."""
        work = self._work.pop(client)
        self._federation.traffic.delivered(client, work.bundles, work.bytes_down)
        [result] = self._federation.admitted(work.done, self._snapshots[work.version], norms=norms)
        if isinstance(result, Contribution):
            self._buffer[client, work.version] = result
        elif isinstance(work.done, Trained):
            work.done.update.unlink()
        return result

    def version_of(self, client: str) -> int | None:
        """The version from which the client works; None if it has delivered all."""
        return self._work[client].version if client in self._work else None

    def clip(self, client: str, version: int, factor: float) -> None:
        """Put another clip factor in the place of that of an update in the buffer."""
        update = self._buffer[client, version]
        self._buffer[client, version] = replace(update, info=replace(update.info, clip_factor=factor))

    def of(self, clients: Sequence[str], versions: Sequence[int]) -> list[Contribution]:
        """Updates of the buffer."""
        return [self._buffer[key] for key in zip(clients, versions, strict=True)]

    def step(self, clients: Sequence[str], versions: Sequence[int]) -> None:
        """Compute the next model from these updates. Raises Diverged."""
        self._federation.step_over(self.of(clients, versions), versions, self._snapshots)

    def commit(self, clients: Sequence[str], versions: Sequence[int]) -> list[Contribution]:
        """Commit the model that `step` computed. Returns the updates, whose files are gone."""
        done = self.of(clients, versions)
        self._federation.commit_over(done)
        self.leave_out(clients, versions)
        used = {version for _, version in self._buffer} | {work.version for work in self._work.values()}
        self._snapshots = {version: self._snapshots[version] for version in used}
        return done

    def leave_out(self, clients: Sequence[str], versions: Sequence[int]) -> None:
        """Remove updates of the buffer."""
        for key in zip(clients, versions, strict=True):
            if isinstance(path := self._buffer.pop(key).update, Path):
                path.unlink()

    def forget(self, version: int) -> None:
        """Drop all that began from a version."""
        self.drop([client for client, work in self._work.items() if work.version == version])
        for client, own in [key for key in self._buffer if key[1] == version]:
            self.leave_out([client], [own])
