"""The process of a package, as the daemon sees it: starts it, asks it, ends it. The next request starts it again.

A process that ends, or sends anything that is no message, costs the work under way alone.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from google.protobuf.message import DecodeError

from algorithms.base import Memory
from fl_client.connection.bundles.expected import Bundle, ResourceKey, key_text
from fl_client.errors import StateError, WorkFailed, task_error
from fl_client.packages.process import Closed, Part, flat, packed, receive, send
from fl_client.settings.config import ClientConfig
from fl_client.storage.disk import make_folder
from fl_client.storage.state import FILES, SHARDS
from fl_client.training.own_loop import OnStep
from fl_client.training.trainer import AnyAssignment
from protos.codec import LayoutError, pack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

LEFT_S = 5.0
"""Seconds that work which nobody waits for may go on; then its process is ended."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A package that may be used, and the task of the settings that it is for."""

    digest: str
    title: str
    """For messages: name, version, digest, signer."""
    folder: Path
    """The folder with its modules."""
    number: int
    """The number of the task in the settings."""


class Child:
    """The process of one package, or none as long as nothing is asked of it."""

    def __init__(self, config: ClientConfig, package: Installed) -> None:
        self._config, self._package = config, package
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._asked = 0
        """The number of requests, by which one that was left is known."""

    def leave(self) -> None:
        """Nobody waits for the work under way. End its process if it goes on for long."""
        asked = self._asked

        def end() -> None:
            if self._asked == asked:
                self.close()

        timer = threading.Timer(LEFT_S, end)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def start(self) -> pb.TaskOffer:
        """Start the process. Returns what it can train. Raises StateError with the reason if it cannot."""
        ours, its = socket.socketpair()
        limits = self._config.packages
        path = self._package.folder.with_suffix(".log")
        with its, path.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with a module of ours
                [sys.executable, "-P", "-m", "fl_client.packages.landlock", str(its.fileno()), self._hidden()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        order = {
            "config": self._config.model_dump(mode="json", exclude={"proxy"}),
            "folder": str(self._package.folder.absolute()),
            "number": self._package.number, "memory_bytes": limits.memory_mib << 20,
            "file_bytes": limits.file_mib << 20, "open_files": limits.open_files,
        }  # fmt: skip
        try:
            ours.settimeout(limits.start_s)
            send(ours, order)
            header, _ = receive(ours)
            ours.settimeout(None)
            if "offer" not in header:
                raise Closed(str(header.get("failed", "no offer"))[:1000])
            return pb.TaskOffer.FromString(bytes.fromhex(header["offer"]))
        except (Closed, OSError, ValueError, TypeError, DecodeError) as error:
            code = self._ended()
            raise StateError(
                f"{self._package.title} cannot be loaded ({code}; its output is in {path}): {error}"
            ) from None

    def _hidden(self) -> str:
        """What is hidden from the process: the daemon's state and key. It sees its own modules and the shards."""
        config, state = self._config, self._config.state_dir.resolve()
        hidden = [state / name for name in FILES if name != SHARDS]
        if (tls := config.tls) is not None:
            hidden += [tls.key.resolve(), *([tls.folder.resolve()] if tls.renew else [])]
        make_folder(state / SHARDS)
        shown = {"read": [str(self._package.folder.resolve())], "write": [str(state / SHARDS)]}
        return json.dumps({"hidden": [str(path) for path in hidden], **shown})

    def _ended(self) -> str:
        """End the process. Returns how it ended."""
        process = self._process
        code = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(1.0)
        self.close()
        if code is None:
            return "it was ended"
        return f"it ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"

    def ask(  # noqa: PLR0913, PLR0917 - what the process needs
        self,
        what: str,
        assignment: AnyAssignment,
        bundles: Mapping[ResourceKey, Bundle] | None = None,
        state: Memory | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """The reply of the process, which is started if it has ended. Raises WorkFailed."""
        self._asked += 1
        if self._connection is None:
            try:
                self.start()
            except StateError as error:
                raise task_error(str(error)) from None
        listed, parts = _packed_all(bundles or {}, state)
        text, training = assignment.SerializeToString().hex(), isinstance(assignment, training_pb2.Assignment)
        connection, most = cast(socket.socket, self._connection), 4 * self._config.max_bundle_bytes
        try:
            send(connection, {"do": what, "assignment": text, "training": training, "parts": listed}, parts)
            while True:
                header, results = receive(connection, most)
                if "step" not in header:
                    break
                self._step(connection, header["step"], on_step)
        except (Closed, OSError) as error:
            raise task_error(
                f"the process of {self._package.title} has ended ({self._ended()}), {error}; it may take"
                f" {self._config.packages.memory_mib} MiB (packages.memory_mib), and start no other process"
            ) from None
        finally:
            self._asked += 1  # a timer that waits for this work ends no later one, and no idle process
        if "failed" in header:
            known = header.get("reason") in pb.FailureReason.values()
            reason = cast(pb.FailureReason, header["reason"]) if known else pb.FAILURE_REASON_TASK_ERROR
            raise WorkFailed(reason, str(header["failed"])[:4000])
        return header, results

    def _step(self, connection: socket.socket, at: Sequence[int], on_step: OnStep | None) -> None:
        try:
            with from_process():
                step, steps = int(at[0]), int(at[1])
            if on_step is not None:
                on_step(step, steps)
        except BaseException:  # the work is not wanted any more: the process stops it, and says so
            with suppress(Closed, OSError):
                send(connection, {"stop": True})
                receive(connection)
            raise
        send(connection, {"stop": False})


@contextmanager
def from_process() -> Iterator[None]:
    """Turns what is wrong with a reply into a failure of the work."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, DecodeError, LayoutError) as error:
        message = f"expected a reply of the package's process as it is agreed, got {type(error).__name__}: {error}"
        raise task_error(message[:1000]) from None


def _packed_all(
    bundles: Mapping[ResourceKey, Bundle], state: Memory | None
) -> tuple[list[tuple[list[Any], str]], list[Part]]:
    """What the process gets beside the assignment: (key, manifest) of each part, and the parts."""
    listed: list[tuple[list[Any], str]] = [(key_text(key), "") for key in bundles]
    parts: list[Part] = [pack(bundle.tensors, bundle.layout) for bundle in bundles.values()]
    if state is not None:
        manifest, data = packed(flat(state))
        listed.append(([0, ""], manifest))
        parts.append(data)
    return listed, parts
