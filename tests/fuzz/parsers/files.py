"""Files that a program reads at a start or later: its own, which a disk may damage, and those that people bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save

from fl_client.settings.config import ClientConfig
from fl_client.storage import client_state_store
from fl_client.storage.client_state_store import ClientStateStore, NextState, StoredState
from fl_client.storage.pending_updates import PendingUpdates, Update, key_of
from fl_common.settings import SettingsError, read_settings
from fl_ops.errors import UsageError
from fl_ops.files import read_run
from fl_server.aggregation.task_model import load_initial
from fl_server.errors import InvalidInput
from fl_server.settings.config import ServerConfig
from fl_server.store.checkpoints import Checkpoint, Checkpoints
from fl_server.store.errors import StoreError
from fl_server.store.spool.kept_files import NOTE, PartPaths, kept_prefix, noted_update, notes_header
from protos.chunks import crc32c
from protos.digests import digest_of
from protos.fl.v1 import training_pb2
from tests.fuzz.examples import DATA, RUN, header
from tests.fuzz.parser import Parser
from tests.processes.tiny_task import plain

_MODEL = {name: tensor.detach() for name, tensor in plain().state_dict().items()}
_MEMORY = {"c": _MODEL}
_DIGEST = digest_of(DATA)


def parsers(folder: Path, opened: ExitStack) -> Iterator[Parser]:
    """One for each kind of file; each has a folder of its own."""
    yield _pending(_made(folder / "pending"))
    yield _state(_made(folder / "state"))
    yield _memory(_made(folder / "memory"))
    yield from _checkpoint(_made(folder / "checkpoints"))
    yield _notes(_made(folder / "spool"))
    yield _initial_model(_made(folder / "initial"))
    yield from _settings(_made(folder / "settings"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _of_file(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    def call(raw: bytes) -> object:
        path.write_bytes(raw)
        return read()

    return call


def _pending(folder: Path) -> Parser:
    """The file of an update whose outcome is unknown, with a next client state."""
    pending = PendingUpdates(folder)
    update = Update(bytes(32), header(), (DATA,))
    update.header.digest.value = _DIGEST
    pending.put(update, NextState(_MEMORY, _MEMORY))
    (path,) = folder.glob("*.update")
    key = key_of(update.header.key)

    def read() -> None:
        pending.files()
        pending.next_state(key)
        if pending.file(key) is not None:
            pending.find(key, bytes(32))

    return Parser("file.pending_update", [path.read_bytes()], _of_file(path, read), weight=2)


def _state(folder: Path) -> Parser:
    """A client state."""
    store = ClientStateStore(folder)
    store.put(StoredState(training_pb2.Outcome(key={"run_id": RUN}, counted=True), _MEMORY))
    (path,) = folder.glob("*.state")

    def read() -> None:
        store.find(RUN)
        store.created_by(RUN)
        store.held()

    return Parser("file.client_state", [path.read_bytes()], _of_file(path, read))


def _memory(folder: Path) -> Parser:
    """The content of a client state, with a digest that always fits, so that what is behind it is read too."""
    path = folder / "memory"
    whole = b"".join(bytes(piece) for piece in client_state_store.encode(b"metadata", [_MEMORY]))

    def call(raw: bytes) -> None:
        path.write_bytes(digest_of(raw) + raw)
        with path.open("rb") as file:
            client_state_store.decode(file, 1)

    return Parser("file.memory", [whole[32:]], call, (client_state_store.Damaged,), weight=2)


def _checkpoint(folder: Path) -> Iterator[Parser]:
    """Each file of a checkpoint. A damaged one counts as missing."""
    checkpoints = Checkpoints(folder)
    saved = checkpoints.save(RUN, 3, Checkpoint(_MODEL, {"Delta": _MODEL}, {"seed": 1}))
    for name in ("meta.json", "model.safetensors"):
        path = saved / name
        whole = path.read_bytes()

        def read(path: Path = path, whole: bytes = whole) -> None:
            try:
                checkpoints.of_round(RUN, 3)
            finally:
                path.write_bytes(whole)

        seed = whole.decode() if name.endswith("json") else whole
        yield Parser(f"file.checkpoint.{name}", [seed], _of_file(path, read), (StoreError,))


def _notes(folder: Path) -> Parser:
    """The notes of an unfinished upload."""
    paths = PartPaths(folder / "part", folder / "notes", folder / "final")
    paths.part.write_bytes(DATA)
    whole = notes_header(_DIGEST, len(DATA)) + NOTE.pack(64, crc32c(DATA[:64])) + NOTE.pack(128, crc32c(DATA[64:128]))

    def read() -> None:
        kept, count = kept_prefix(paths, _DIGEST, len(DATA))
        assert 0 <= kept <= len(DATA)
        assert (kept == 0) == (count == 0)
        noted_update(paths.notes)

    return Parser("file.upload_notes", [whole, notes_header(_DIGEST, len(DATA)).decode()], _of_file(paths.notes, read))


def _initial_model(folder: Path) -> Parser:
    """The first model of a run, which an operator brings."""
    path, module = folder / "model.safetensors", plain()
    seeds = [save(_MODEL), save({**_MODEL, "0.weight": torch.zeros(2)})]

    def read() -> None:
        try:
            load_initial(module, path, keep_frozen=False)
        finally:
            assert all(parameter.dtype == torch.float32 for parameter in module.parameters())

    return Parser("file.initial_model", seeds, _of_file(path, read), (InvalidInput,), weight=2)


_SERVER = """
state_dir = "state"
listen = "127.0.0.1:7070"
insecure = true
tasks = ["my_task:Wine"]
[limits]
reattach_grace_s = 20.0
max_clients = 100
[connections]
idle_s = 300
[quarantine]
"""
_CLIENT = """
client_id = "edge-1"
server = "127.0.0.1:7070"
state_dir = "state"
insecure = true
[task]
name = "digits"
options = {model = "mlp", x = [1, 2.5, {y = "z"}]}
[shard]
partition = {method = "iid", clients = 4, seed = 1}
index = 1
[limits]
max_runs = 3
[gates]
windows = ["mon-fri 22:00-06:00"]
"""
_RUN = """
name = "first"
task = {name = "digits", options = {model = "mlp"}}
labels = {site = "north"}
[algorithm]
name = "fedcm"
parameters = {alpha = 0.1}
schedules = {alpha = {kind = "step", milestones = [3, 5], factor = 0.5}}
[local]
learning_rate = 0.1
epochs = 1
[round]
clients_per_round = 4
deadline_s = 60.0
[stop]
rounds = 10
"""


def _settings(folder: Path) -> Iterator[Parser]:
    """Settings of server and client, and a run's file."""
    server, client, run = (folder / name for name in ("server.toml", "client.toml", "run.toml"))
    yield Parser(
        "file.server_settings", [_SERVER], _of_file(server, lambda: read_settings(server, ServerConfig)),
        (SettingsError,),
    )  # fmt: skip
    yield Parser(
        "file.client_settings", [_CLIENT], _of_file(client, lambda: read_settings(client, ClientConfig)),
        (SettingsError,),
    )  # fmt: skip
    yield Parser("file.run", [_RUN], _of_file(run, lambda: read_run(run)), (UsageError,))
