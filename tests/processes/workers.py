"""Workers of a coordinator as processes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Self

from tests.processes.federation import Coordinator
from tests.processes.process import Process, Workspace, write_toml


def free_address() -> str:
    """A loopback address that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def section(**settings: Any) -> dict[str, Any]:
    """A coordinator's [workers] section."""
    return {"listen": free_address(), "serve": free_address(), **settings}


class Worker(Process):
    """A worker, with the coordinator's settings and its own."""

    def __init__(
        self,
        workspace: Workspace,
        server: Coordinator,
        name: str,
        settings: Mapping[str, Any] | None = None,
        program: str = "fl_server",
    ) -> None:
        super().__init__(workspace, name, program)
        self._server = server.config
        own = {"metrics_listen": "", **(settings or {})}
        self.metrics_listen = str(own["metrics_listen"])
        write_toml(self.config, own)

    @property
    def arguments(self) -> list[str]:
        return ["--role", "data", "--config", str(self._server), "--config", str(self.config)]

    def serve(self) -> Self:
        """Start it, and wait until it serves."""
        before = len(self.events("serving"))
        self.start()
        self.logged("serving", before + 1)
        return self
