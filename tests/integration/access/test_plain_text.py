"""Both programs warn of plain text over a network at every start."""

from __future__ import annotations

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace


def test_plain_text_over_a_network_is_logged_at_every_start(workspace: Workspace) -> None:
    """The second start warns like the first one, because the owner may have forgotten the setting."""
    server = Coordinator(workspace, settings={"insecure_remote": True})
    for start in (1, 2):
        server.serve()
        warned = server.logged("insecure_remote", start)
        assert (warned["level"], "[tls]" in warned["todo"]) == ("warning", True)
        server.kill()
    server.serve()
    daemon = Daemon(workspace, server, "edge-1", insecure_remote=True)
    for start in (1, 2):
        assert daemon.start().logged("insecure_remote", start)["level"] == "warning"
        daemon.kill()
