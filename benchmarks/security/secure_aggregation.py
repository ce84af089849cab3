"""Cost of a secure aggregation for its clients and for the coordinator, without network and training.

    python -m benchmarks.security.secure_aggregation [--values 11200000] [--clients 10] [--dropped 0]

All stages in one process and one thread, with real certificates; masked updates are files, as in a coordinator's spool.
`--dropped` clients send shares and no masked update. The sum is compared with the plain one. Prints JSON: processor
seconds of a client (the median over clients) and of the coordinator by stage, bytes of a client's messages, and the
growth of the resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from algorithms.quantization import Numbers, Quantizer
from benchmarks.security.private_noise import peak_mib
from fl_common.privacy.secret_stream import SecretStream, derived
from fl_common.secure_aggregation.collector import Collector
from fl_common.secure_aggregation.masks import Reader
from fl_common.secure_aggregation.member import Member
from fl_common.secure_aggregation.signatures import Signer, Trust
from fl_common.secure_aggregation.terms import Place, Settings, Terms, value_bits_for
from fl_ops.certificates import ca

_RUN = "benchmark"
_T = TypeVar("_T")


@dataclass
class Case:
    """One secure aggregation, and what was measured in it."""

    terms: Terms
    quantizer: Quantizer
    folder: Path
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of a message from one client, or to one."""
    memory: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = datetime.now(UTC)
        validity = ca.Validity(self.now - timedelta(days=1), 7)
        authority = ca.make_authority("Clients", validity)
        self.trust = Trust.of_authorities(ca.certificate_pem(authority.certificate), "outside")
        self.members = {client: Member(client, _RUN) for client in self.terms.cohort}
        self.signers = {}
        for client in self.terms.cohort:
            certificate, key = ca.issue(authority, ca.Identity("client", client), ca.Validity(self.now, 1))
            self.signers[client] = Signer.from_pem(ca.certificate_pem(certificate), ca.key_pem(key))
        self.collector = Collector(self.terms, self.trust)

    @contextmanager
    def measured(self, what: str) -> Iterator[None]:
        """Add the processor time of the block."""
        began = time.process_time()
        yield
        self.seconds[what].append(time.process_time() - began)

    def grown(self, what: str, work: Callable[[], _T]) -> _T:
        """The result of some work, after measuring by how much the resident memory grows in it."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = peak_mib()
        made = work()
        self.memory[what] = round(peak_mib() - before, 1)
        return made

    def answers(self, stage: str, ask: Callable[[str], bytes], clients: tuple[str, ...]) -> dict[str, bytes]:
        """Each client's answer in a stage."""
        made = {}
        for client in clients:
            with self.measured(f"client {stage}"):
                made[client] = ask(client)
        self.sent[f"{stage} up"] = max(map(len, made.values()))
        return made

    def numbers(self, client: str) -> Numbers:
        """A client's quantized update."""
        generator = torch.Generator().manual_seed(int(client[1:]))
        update = {name: torch.randn(shape, generator=generator) for name, shape in self.quantizer.shapes.items()}
        stream, own = SecretStream(derived(bytes(32), "rotation")), SecretStream(derived(bytes(32), client))
        with self.measured("client quantize"):
            return self.quantizer.quantize(update, 1.0, stream, own)

    def mask(self, client: str, delivery: bytes, numbers: Numbers) -> None:
        """Write a client's masked update."""
        with self.measured("client mask"), (self.folder / client).open("wb") as file:
            for piece in self.members[client].mask(delivery, numbers, [1]):
                file.write(piece)

    def key_stages(self) -> dict[str, bytes]:
        """Keys, coins and shares; returns the deliveries."""
        collector, members, now = self.collector, self.members, self.now
        keys = self.answers(
            "keys", lambda client: members[client].begin(self.terms, client.encode(), self.signers[client]),
            self.terms.cohort,
        )  # fmt: skip
        with self.measured("server keys"):
            for client, message in keys.items():
                collector.add_keys(client, message, now)
            data = collector.close_keys()
        self.sent["keys down"] = len(data)
        made = self.answers(
            "key list", lambda client: members[client].answer_key_list(data, self.trust, now), collector.members
        )
        if collector.needs_coins:
            for client, message in made.items():
                collector.add_coin(client, message)
            coins = collector.close_coins()
            self.sent["coins down"] = len(coins)
            made = self.answers("shares", lambda client: members[client].answer_coins(coins), collector.members)
        with self.measured("server shares"):
            for client, message in made.items():
                collector.add_shares(client, message)
            deliveries = collector.close_shares()
        self.sent["shares down"] = max(map(len, deliveries.values()))
        return deliveries

    def open_stages(self, survivors: tuple[str, ...]) -> None:
        """Signatures and opened shares."""
        collector, members = self.collector, self.members
        data = collector.close_masked(survivors)
        signed = self.answers(
            "signature", lambda client: members[client].answer_survivors(data, self.signers[client]), survivors
        )
        with self.measured("server signatures"):
            for client, message in signed.items():
                collector.add_signature(client, message)
            signatures = collector.close_signatures()
        self.sent["signatures down"] = len(signatures)
        opened = self.answers("opening", lambda client: members[client].answer_signatures(signatures), survivors)
        for client, message in opened.items():
            collector.add_opening(client, message)

    def unmask(self, survivors: tuple[str, ...]) -> Numbers:
        """The sum of the masked updates in the folder."""
        with self.measured("server unmask"):
            unmasked = self.collector.unmasked([_reader(self.folder / client) for client in survivors])
            total, at = np.empty(self.terms.values, np.int64), 0
            for chunk in unmasked.values():
                total[at : at + len(chunk)] = chunk
                at += len(chunk)
        return total

    def mean(self, total: Numbers, clients: int) -> None:
        """Make the mean from the sum."""
        with self.measured("server mean"):
            self.quantizer.mean(total, clients, SecretStream(derived(bytes(32), "rotation")))


def _reader(path: Path) -> Reader:
    descriptor = os.open(path, os.O_RDONLY)
    return lambda offset, count: os.pread(descriptor, count, offset)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=11_200_000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--dropped", type=int, default=0)
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--suite", default=Settings().suite)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cohort = tuple(f"c{number:03}" for number in range(options.clients))
    bits = value_bits_for(options.bits, options.clients)
    terms = Terms(Place(_RUN, 0), 0, cohort, options.values, bits, 1, Settings(suite=options.suite))
    quantizer = Quantizer(float(options.values) ** 0.5, options.bits, {"w": (options.values,)})
    with tempfile.TemporaryDirectory(prefix="secure-aggregation-") as folder:
        case = Case(terms, quantizer, Path(folder))
        deliveries = case.key_stages()
        survivors = cohort[: len(cohort) - options.dropped]
        plain = np.zeros(options.values, np.int64)
        for client in survivors:
            numbers = case.numbers(client)
            plain += numbers
            case.grown("client mask", lambda: case.mask(client, deliveries[client], numbers))  # noqa: B023 - called here
        case.sent["update up"] = terms.size_bytes
        case.open_stages(survivors)
        total = case.grown("server unmask", lambda: case.unmask(survivors))
        case.mean(total, len(survivors))
        if not np.array_equal(total, plain):
            raise SystemExit("expected the sum of the plain numbers, got another one")
    print(json.dumps(_report(case, options.clients)))


def _report(case: Case, clients: int) -> dict[str, object]:
    plan = case.collector.group.plan
    seconds = {what: statistics.median(times) for what, times in case.seconds.items()}
    return {
        "values": case.terms.values, "clients": clients, "dropped": clients - len(case.collector.survivors),
        "suite": case.terms.settings.suite, "bits": case.quantizer.bits, "value_bits": case.terms.value_bits,
        "neighbours": plan.neighbours, "threshold": plan.threshold, "quorum": plan.quorum,
        "client_s": round(sum(s for what, s in seconds.items() if what.startswith("client")), 3),
        "server_s": round(sum(s for what, s in seconds.items() if what.startswith("server")), 3),
        "seconds": {what: round(s, 4) for what, s in seconds.items()},
        "bytes": dict(case.sent), "memory_mib": case.memory,
        "state_bytes": len(case.members[case.terms.cohort[0]].to_bytes()),
    }  # fmt: skip


if __name__ == "__main__":
    main()
