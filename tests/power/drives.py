"""What a drive may have kept when the power was cut, and a folder made of it.

A drive has for certain what it said it had: content of files and names of folders as they were when they were synced,
and the transactions up to the last one that was synced. Of the rest it may have kept anything, in these bounds:

- A name's changes come back in their order, and so do those of one file or folder; names apart from another in any.
- Content not synced is what it was before, nothing, or torn: blocks of it are old, new or zero, and its end is missing.
- The database comes back between two transactions, as SQLite's checksums see to, and none is there without those
  before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from random import Random
from typing import Any

from tests.power.recorder import LEDGER, ROOT, Ended, Named, Node, Operation, Synced, Told, Written

BLOCK = 64
"""Bytes that are kept or lost together: small, so that files of a test have several."""

Tree = dict[str, bytes | None]
"""Path -> content; None for a folder."""


class Rest(Enum):
    """What becomes of that which no sync had covered."""

    LOST = auto()
    KEPT = auto()
    DRAWN = auto()


@dataclass(frozen=True, slots=True)
class Cut:
    """How a drive loses what it need not have."""

    names: Rest = Rest.LOST
    content: Rest = Rest.LOST
    transactions: Rest = Rest.LOST
    seed: int = 0


ALL = Cut(Rest.KEPT, Rest.KEPT, Rest.KEPT)
"""What a process that is killed leaves: the system goes on and writes all of it."""


@dataclass
class Drive:
    """Told one operation after the other."""

    told: Any = None
    """What was told last."""
    _names: dict[Node, dict[str, Node | None]] = field(default_factory=dict)
    _waiting: dict[Node, list[dict[str, Node | None]]] = field(default_factory=dict)
    _content: dict[Node, bytes] = field(default_factory=dict)
    _written: dict[Node, bytes] = field(default_factory=dict)
    _images: list[bytes] = field(default_factory=lambda: [b""])
    """The last one that is there for certain, and those after it."""

    def hear(self, operation: Operation) -> None:
        """One operation more."""
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
            case Ended(image, synced):
                self._images = [image] if synced else [*self._images, image]
            case Told(what):
                self.told = what

    def cut(self, how: Cut) -> Tree:
        """What is there when the power is back."""
        return _Loss(self, how).below(ROOT, "")

    def paths(self) -> dict[str, Node]:
        """What has a name now, as a program sees it: folders before what is in them."""
        return _Loss(self, ALL).paths(ROOT, "")


class _Loss:
    """One cut of the power; draws as its seed says."""

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

    def _keeps(self, rest: Rest) -> bool:
        return rest is Rest.KEPT or (rest is Rest.DRAWN and self._chance.random() < 0.5)

    def _content_of(self, file: Node) -> bytes:
        old, new = self._drive._content.get(file, b""), self._drive._written.get(file, b"")
        if self._how.content is Rest.DRAWN and old != new:
            return self._torn(old, new)
        return new if self._how.content is Rest.KEPT else old

    def _torn(self, old: bytes, new: bytes) -> bytes:
        size = self._chance.choice((len(old), len(new), self._chance.randint(0, len(new))))
        sources = [data.ljust(size, b"\0") for data in (old, new, b"")]
        spans = [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
        return b"".join(self._chance.choice(sources)[span] for span in spans)

    def _image(self) -> bytes:
        images = self._drive._images
        if self._how.transactions is Rest.DRAWN:
            return self._chance.choice(images)
        return images[-1 if self._how.transactions is Rest.KEPT else 0]


def after_each(record: Iterable[Operation]) -> Iterable[Drive]:
    """The same drive after each operation; look at it before going on."""
    drive = Drive()
    yield drive
    for operation in record:
        drive.hear(operation)
        yield drive


def put(tree: Tree, folder: Path) -> None:
    """Make a folder of what a drive kept."""
    folder.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
