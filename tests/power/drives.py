"""The possible contents of a drive after a power cut, and a folder with such a content.

A drive keeps everything that it confirmed: content of files and names in folders as of their last sync, and the
transactions up to the last synced one. It may keep any part of the rest, within these bounds:

- The changes of one name, and those of one file or folder, are kept in their order. Independent names have no order.
- Content that was not synced is old, empty or torn: its blocks are old, new or zero, and its end may be missing.
- The database is in a state between two transactions, because SQLite checks its checksums. A kept transaction implies
  all earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from random import Random
from typing import Any

from tests.power.recorder import LEDGER, ROOT, Committed, Named, Node, Operation, Reported, Synced, Written

BLOCK = 64
"""Bytes that are kept or lost together; small, so that the files of a test have several blocks."""

Tree = dict[str, bytes | None]
"""Path -> content; None for a folder."""


class Unsynced(Enum):
    """What happens to changes that were not synced."""

    LOST = auto()
    KEPT = auto()
    DRAWN = auto()


@dataclass(frozen=True, slots=True)
class Cut:
    """How a power cut loses changes that were not synced."""

    names: Unsynced = Unsynced.LOST
    content: Unsynced = Unsynced.LOST
    transactions: Unsynced = Unsynced.LOST
    seed: int = 0


ALL = Cut(Unsynced.KEPT, Unsynced.KEPT, Unsynced.KEPT)
"""The content after a kill of the process: the system continues and writes everything."""


@dataclass
class Drive:
    """A drive that receives one operation after the other."""

    reported: Any = None
    """The last reported message."""
    _names: dict[Node, dict[str, Node | None]] = field(default_factory=dict)
    _waiting: dict[Node, list[dict[str, Node | None]]] = field(default_factory=dict)
    _content: dict[Node, bytes] = field(default_factory=dict)
    _written: dict[Node, bytes] = field(default_factory=dict)
    _images: list[bytes] = field(default_factory=lambda: [b""])
    """The last certain image of the database, and the later ones."""

    def apply(self, operation: Operation) -> None:
        """Apply an operation."""
        match operation:
            case Named(folder, changes):
                self._waiting.setdefault(folder, []).append(changes)
            case Written(file, content):
                self._written[file] = content
            case Synced(node) if node.is_folder:
                for changes in self._waiting.pop(node, []):
                    self._names.setdefault(node, {}).update(changes)
            case Synced(node):
                self._content[node] = self._written.get(node, b"")
            case Committed(image, synced):
                self._images = [image] if synced else [*self._images, image]
            case Reported(what):
                self.reported = what

    def cut(self, how: Cut) -> Tree:
        """The content of the drive after a power cut."""
        return _Loss(self, how).below(ROOT, "")

    def paths(self) -> dict[str, Node]:
        """Path -> node as a program sees it now; folders precede their content."""
        return _Loss(self, ALL).paths(ROOT, "")


class _Loss:
    """One power cut; its random choices depend on its seed."""

    def __init__(self, drive: Drive, how: Cut) -> None:
        self._drive, self._how, self._chance = drive, how, Random(how.seed)

    def below(self, folder: Node, path: str) -> Tree:
        tree: Tree = {}
        for name, node in sorted(self._names_of(folder).items()):
            at = f"{path}{name}"
            if node.is_folder:
                tree |= {at: None, **self.below(node, f"{at}/")}
            else:
                tree[at] = self._image() if name == LEDGER else self._content_of(node)
        return tree

    def paths(self, folder: Node, path: str) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for name, node in self._names_of(folder).items():
            found |= {f"{path}{name}": node, **(self.paths(node, f"{path}{name}/") if node.is_folder else {})}
        return found

    def _names_of(self, folder: Node) -> dict[str, Node]:
        names = dict(self._drive._names.get(folder, {}))
        lost: set[object] = set()
        for changes in self._drive._waiting.get(folder, []):
            touched = {*changes, *changes.values(), *(names.get(name) for name in changes)} - {None}
            if touched & lost or not self._keeps(self._how.names):
                lost |= touched
            else:
                names |= changes
        return {name: node for name, node in names.items() if node is not None}

    def _keeps(self, rest: Unsynced) -> bool:
        return rest is Unsynced.KEPT or (rest is Unsynced.DRAWN and self._chance.random() < 0.5)

    def _content_of(self, file: Node) -> bytes:
        old, new = self._drive._content.get(file, b""), self._drive._written.get(file, b"")
        if self._how.content is Unsynced.DRAWN and old != new:
            return self._torn(old, new)
        return new if self._how.content is Unsynced.KEPT else old

    def _torn(self, old: bytes, new: bytes) -> bytes:
        size = self._chance.choice((len(old), len(new), self._chance.randint(0, len(new))))
        sources = [data.ljust(size, b"\0") for data in (old, new, b"")]
        spans = [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
        return b"".join(self._chance.choice(sources)[span] for span in spans)

    def _image(self) -> bytes:
        images = self._drive._images
        if self._how.transactions is Unsynced.DRAWN:
            return self._chance.choice(images)
        return images[-1 if self._how.transactions is Unsynced.KEPT else 0]


def after_each(record: Iterable[Operation]) -> Iterable[Drive]:
    """Yield the same drive after each operation. Use it before the next step."""
    drive = Drive()
    yield drive
    for operation in record:
        drive.apply(operation)
        yield drive


def put(tree: Tree, folder: Path) -> None:
    """Write the kept content of a drive to a folder."""
    folder.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
