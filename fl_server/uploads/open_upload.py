"""An open upload as the code sees it that receives the bytes, in the coordinator or in a worker."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fl_server.admission.reading import UpdateContent
from fl_server.store.errors import StoreError
from protos.fl.v1.training_pb2 import Receipt, UpdateHeader

T = TypeVar("T")


class Decided(Exception):
    """The coordinator has decided about the update: its client needs not send the rest."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt.detail)
        self.receipt = receipt

    def keeps(self, header: UpdateHeader) -> bool:
        """Whether the bytes of an upload with this header are those of an admitted update."""
        return self.receipt.admitted and self.receipt.digest == header.digest


class OpenUpload(Protocol):
    """One upload whose header is accepted. The coordinator has one for its own uploads, a worker asks the coordinator.

    Each method may raise the error that ended the upload, or Decided.
    """

    @property
    def header(self) -> UpdateHeader:
        """Its header."""
        ...

    @property
    def client(self) -> str:
        """Who sends it."""
        ...

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that may wait long for the client. Raises as soon as the upload is ended from outside."""
        ...

    def check(self) -> None:
        """Raise if the client may not go on."""
        ...

    def wrote(self, count: int) -> None:
        """So many bytes more are on the disk."""
        ...

    async def advance(self, count: int) -> None:
        """So many bytes more have come. Returns when the next ones may come."""
        ...

    def read(self, path: Path) -> UpdateContent:
        """Read the whole file for `check_content`. Blocking. Raises StoreError."""
        ...

    async def check_content(self, content: UpdateContent, path: Path) -> None:
        """Have the update checked before it gets its final name. Raises UploadBroken, if other bytes may come."""
        ...

    async def admit(self) -> Receipt:
        """Have the update counted, which is whole under its final name."""
        ...

    async def failed(self, error: StoreError) -> Receipt:
        """The file of the upload cannot be used. Returns the receipt if that does not matter any more, else raises."""
        ...
