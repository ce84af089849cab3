"""Plain text over a network is warned of at every start, by both programs."""

from __future__ import annotations

from tests.integration.harness import Coordinator, Daemon


def test_plain_text_over_a_network_is_warned_of_at_every_start(place):
    """The second start is as loud as the first: who set the key once may have forgotten it."""
    server = Coordinator(place, settings={"insecure_remote": True})
    for start in (1, 2):
        server.serve()
        warned = server.logged("insecure_remote", start)
        assert (warned["level"], "[tls]" in warned["todo"]) == ("warning", True)
        server.kill()
    server.serve()
    daemon = Daemon(place, server, "edge-1", insecure_remote=True)
    for start in (1, 2):
        assert daemon.start().logged("insecure_remote", start)["level"] == "warning"
        daemon.kill()
