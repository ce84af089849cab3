"""A standby's copies of what it would have to fetch first: the newest checkpoint of each run that has not ended."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from pathlib import Path

import structlog

from fl_server.store.database.leadership import LeaseWatch
from fl_server.store.database.ledger_objects import StoredFile
from fl_server.store.errors import StoreError
from fl_server.store.objects.bucket import Bucket
from fl_server.store.objects.reading import ObjectReader

log = structlog.get_logger()

CHECKPOINTS = "checkpoints"


class Copies:
    """The copies of one standby. `follow` is called by one thread."""

    def __init__(self, watch: LeaseWatch, bucket: Bucket, state_dir: Path) -> None:
        self._watch, self._bucket, self._state_dir = watch, bucket, state_dir
        self._lock, self._stopped = threading.Lock(), False
        self.behind_bytes = 0
        """Bytes of the newest checkpoints that are not copied yet."""

    def follow(self) -> None:
        """Copy what is missing, and remove what is not needed any more. Raises StoreUnavailable."""
        wanted = newest(self._watch.stored_files(CHECKPOINTS), set(self._watch.open_runs()))
        self._remove_others({(self._state_dir / file.name).parent for file in wanted})
        missing = [file for file in wanted if not self._has(file)]
        self.behind_bytes = sum(file.size_bytes for file in missing)
        reader = ObjectReader(self._bucket, self._watch.ledger_id())
        try:
            for file in missing:
                if self._stopped:
                    return
                self._fetch(reader, file)
        finally:
            reader.close()

    def _fetch(self, reader: ObjectReader, file: StoredFile) -> None:
        try:
            reader.fetch(file, self._state_dir / file.name)
        except StoreError as error:  # the leader may have removed it meanwhile
            log.info("not_copied", file=file.name, error=str(error))
        else:
            self.behind_bytes -= file.size_bytes

    def stop(self) -> None:
        """Begin no other file, and remove none: the folder belongs to a leader from now on."""
        with self._lock:
            self._stopped = True

    def close(self) -> None:
        """Close the connection."""
        self._watch.close()

    def _has(self, file: StoredFile) -> bool:
        path = self._state_dir / file.name
        return path.exists() and path.stat().st_size == file.size_bytes

    def _remove_others(self, wanted: set[Path]) -> None:
        with self._lock:
            if not self._stopped:
                for folder in self._state_dir.glob(f"{CHECKPOINTS}/run-*/round-*"):
                    if folder not in wanted:
                        shutil.rmtree(folder, ignore_errors=True)


def newest(files: list[StoredFile], open_runs: set[str]) -> list[StoredFile]:
    """The files of the newest checkpoint of each of these runs."""
    rounds: dict[str, dict[str, list[StoredFile]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        _, run, *rest = Path(file.name).parts
        if run.removeprefix("run-") in open_runs and len(rest) == 2:
            rounds[run][rest[0]].append(file)
    chosen = []
    for folders in rounds.values():
        numbers = {_number(folder): folder for folder in folders}
        chosen += folders[numbers[max(numbers)]]
    return chosen


def _number(folder: str) -> int:
    number = folder.removeprefix("round-")
    return int(number) if number.isdecimal() else -1
