"""A caller that sends calls as raw HTTP/2, with wrong frames and headers, to every port.

The transport itself answers many of them: with INTERNAL where the protocol asks for it, or by closing the connection.
So the answers are counted. What fails is a coordinator that does not answer a correct call afterwards.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from fl_ops.admin.settings import Certificates
from tests.fuzz.live.frames import RawCall, changed_call, exchange, message
from tests.fuzz.live.methods import CLIENTS, DEVICES, OPERATORS, PROBES, served
from tests.fuzz.mutation import random_for, raw_of
from tests.hostile.federation import Federation
from tests.processes.process import eventually

WAIT_S = 0.5
"""For an answer to wrong frames: many get none."""
CHECKED_EVERY = 20
MOST_BYTES = 8000
_CHECK = RawCall(b"/grpc.health.v1.Health/Check", message(b""))


class FrameCaller:
    """One thread uses it."""

    def __init__(self, federation: Federation, seed: int) -> None:
        settings = federation.server.settings
        self._seed, self._methods = seed, served()
        client, operator = (federation.hostile("framer", role) for role in ("client", "admin"))
        self._ports: dict[str, tuple[str, Certificates | None]] = {
            CLIENTS: (str(settings[CLIENTS]), client),
            OPERATORS: (str(settings[OPERATORS]), operator),
            PROBES: (str(settings[PROBES]), None),
            DEVICES: (str(settings[DEVICES]), client),
        }
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []

    def call(self) -> None:
        """Send the next call. After some, check that every port still answers."""
        random = random_for(self._seed, "frames", self.answers.total())
        method = random.choice(self._methods)
        sent = b"".join(changed_call(random, method.path, raw_of(random.choice(method.seeds))[:MOST_BYTES]))
        address, certificates = self._ports[method.port]
        try:
            status = exchange(address, sent, certificates, WAIT_S)
        except OSError:  # the port is being served again
            status = None
        self.answers[str(status)] += 1
        if self.answers.total() % CHECKED_EVERY == 0:
            self._check()

    def _check(self) -> None:
        for setting, (address, certificates) in self._ports.items():
            if setting == DEVICES:
                continue  # it has no health service: the callers' own calls show that it answers
            try:
                eventually(partial(_answers, address, certificates), f"{setting} answers")
            except AssertionError as error:
                self.failures.append(f"frames, call {self.answers.total()}: {error}")


def _answers(address: str, certificates: Certificates | None) -> bool:
    try:
        return exchange(address, b"".join(_CHECK.frames()), certificates) == 0
    except OSError:
        return False
