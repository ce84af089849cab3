"""A real Alertmanager for a test, and a webhook that receives its alerts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.monitoring.programs import listening, needed
from tests.processes.process import eventually


@dataclass
class Alertmanager:
    """A running Alertmanager and the notifications of its webhook."""

    address: str
    notifications: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the webhook's requests, the oldest first."""

    def delivered(self, alert: str, status: str = "firing", since: float = 0.0) -> dict[str, Any]:
        """Wait for the first delivered alert of this name and status that began after a unix time."""

        def probe() -> dict[str, Any] | None:
            delivered = [sent for body in list(self.notifications) for sent in body["alerts"]]
            named = (sent for sent in delivered if sent["labels"]["alertname"] == alert and sent["status"] == status)
            return next((sent for sent in named if datetime.fromisoformat(sent["startsAt"]).timestamp() > since), None)

        return eventually(probe, f"the webhook receives {alert} as {status}")


@contextmanager
def alertmanager(folder: Path) -> Iterator[Alertmanager]:
    """An Alertmanager that sends everything to a webhook on loopback at once; both end with the block.

    Skips the test if none is installed.
    """
    needed("prometheus-alertmanager")
    notifications: list[dict[str, Any]] = []
    with _webhook(notifications) as url:
        route = {"receiver": "webhook", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
        receiver = {"name": "webhook", "webhook_configs": [{"url": url, "send_resolved": True}]}
        (folder / "alertmanager.yml").write_text(json.dumps({"route": route, "receivers": [receiver]}))
        options = {
            "config.file": folder / "alertmanager.yml",
            "storage.path": folder / "alertmanager",
            "web.listen-address": "127.0.0.1:0",
            "cluster.listen-address": "",
        }
        command = ["prometheus-alertmanager", *(f"--{name}={value}" for name, value in options.items())]
        with listening(command, folder / "alertmanager.log") as address:
            yield Alertmanager(address, notifications)


@contextmanager
def _webhook(notifications: list[dict[str, Any]]) -> Iterator[str]:
    """A web server that keeps the body of each POST request; yields its URL."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            notifications.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write no log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
