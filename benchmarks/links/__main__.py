"""Seconds of downloads, uploads and rounds over slow and long links: real daemons behind a proxy.

    python -m benchmarks.links --links 50MB/s,200ms --params 11173962 --clients 1 --rounds 3

Prints one JSON line for each link, and then the rows of the table. Every client has a link of its own. It fails if the
final model is not the expected one; with --encoding, which may round values, the model is not checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from benchmarks import round_overhead
from benchmarks.deployment import TASK, Deployment, cpu_s, peak_mb, resident_mb
from benchmarks.links.link import Link
from benchmarks.links.proxy import proxy
from benchmarks.processes import Child, Processes
from benchmarks.table import markdown
from protos.run_file import parse_run

LINKS = ("10Mbit/s,20ms", "100Mbit/s,50ms", "50MB/s,200ms")
KEYS = ("update", "model", "direction", "difference")


class Transfer(NamedTuple):
    """One assignment of a daemon: seconds from the assignment to the trained update and on to the receipt.

    The download includes the decoding of the model, the upload the saving of the update.
    """

    download_s: float
    upload_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each link, and print."""
    case = _parser().parse_args(arguments)
    found = []
    for text in case.links:
        with tempfile.TemporaryDirectory(prefix="links-") as folder, Processes(Path(folder)) as processes:
            found.append(measure(case, text, Deployment(Path(folder), processes, tls=case.tls)))
        print(json.dumps(found[-1]), flush=True)
    sys.stderr.write("\n".join(markdown(rows(found))) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Downloads and uploads over slow and long links.")
    parser.add_argument("--links", nargs="+", default=LINKS, help="RATE,TIMEms or DOWN/UP,TIMEms of each link")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=62)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; one more comes first")
    parser.add_argument("--algorithm", choices=("fedavg", "fedcm"), default="fedavg")
    parser.add_argument("--tls", action="store_true", help="mTLS instead of plain text")
    parser.add_argument(
        "--encoding", nargs="+", default=[], metavar="KEY=NAME", type=_encoding,
        help=f"the run's encodings, for example update=int8 difference=previous; keys: {', '.join(KEYS)}",
    )  # fmt: skip
    parser.add_argument("--ahead-mib", type=float, default=1.0, help="the coordinator's transfers.ahead_mib")
    return parser


def _encoding(text: str) -> tuple[str, str]:
    key, _, name = text.partition("=")
    if key not in KEYS or not name:
        raise argparse.ArgumentTypeError(f"expected KEY=NAME with a key of {', '.join(KEYS)}, got {text!r}")
    return key, name


def measure(case: argparse.Namespace, link: str, deployment: Deployment) -> dict[str, Any]:
    """Run over one link; the caller stops the processes."""
    task = f'name = "{TASK}"\noptions = {{parameters = {case.params}, tensors = {case.tensors}}}\n'
    server = deployment.serve(extra=f"[transfers]\nahead_mib = {case.ahead_mib}\n")
    idle_mb, start_s = resident_mb(server.child), cpu_s(server.child)
    case.rounds += 1
    with proxy(server.address, Link.parse(link)) as address, server.operator() as admin:
        daemons = [deployment.daemon(f"client-{index:03d}", address, task) for index in range(case.clients)]
        run = admin.runs.create_run(parse_run(tomllib.loads(run_toml(case)))).run.run_id
        rounds = round_overhead.committed_rounds(admin, run, case.rounds)
        round_overhead.export(admin, run, model := deployment.folder / "model.safetensors")
    if not case.encoding:
        round_overhead.check(case, load_file(model))
    case.rounds -= 1
    # The first round is longer: the daemons load torch in it.
    found = [transfer for daemon in daemons for transfer in transfers(_events(daemon))[1:]]
    return {
        "link": link,
        "clients": case.clients,
        "params": case.params,
        "algorithm": case.algorithm,
        "tls": case.tls,
        "ahead_mib": case.ahead_mib,
        "encoding": dict(case.encoding),
        "download_s": [round(transfer.download_s, 3) for transfer in found],
        "upload_s": [round(transfer.upload_s, 3) for transfer in found],
        "round_s": [round(row.seconds, 3) for row in rounds[1:]],
        "download_s_median": round(statistics.median(transfer.download_s for transfer in found), 3),
        "upload_s_median": round(statistics.median(transfer.upload_s for transfer in found), 3),
        "round_s_median": round(statistics.median(row.seconds for row in rounds[1:]), 3),
        "bytes_down": rounds[-1].bytes_down,
        "bytes_up": rounds[-1].bytes_up,
        "server_rss_mb": peak_mb(server.child),
        "server_rss_mb_idle": idle_mb,
        "server_cpu_s_per_round": round((cpu_s(server.child) - start_s) / len(rounds), 3),
    }


def run_toml(case: argparse.Namespace) -> str:
    """The run's file. It has the section [encodings] only if an encoding is given."""
    lines = [
        'name = "links"',
        "[task]",
        f'name = "{TASK}"',
        f"options = {{parameters = {case.params}, tensors = {case.tensors}}}",
        "[algorithm]",
        f'name = "{case.algorithm}"',
        *([f"parameters = {{alpha = {round_overhead.ALPHA}}}"] if case.algorithm == "fedcm" else []),
        "[local]",
        "learning_rate = 1.0",
        "[round]",
        f"clients_per_round = {case.clients}",
        f"min_clients = {case.clients}",
        "[stop]",
        f"rounds = {case.rounds}",
        "[evaluation]",
        "every = 0",
        *(["[encodings]"] if case.encoding else []),
        *(f'{key} = "{name}"' for key, name in case.encoding),
    ]
    return "\n".join(lines)


def transfers(events: Iterable[dict[str, Any]]) -> list[Transfer]:
    """The assignments in a daemon's log, in order."""
    kept = [event for event in events if event.get("event") in ("assignment", "trained", "submitted")]
    if [event["event"] for event in kept] != ["assignment", "trained", "submitted"] * (len(kept) // 3):
        raise SystemExit(f"expected assignment, trained, submitted again and again, got {kept}")
    found = []
    for three in zip(kept[::3], kept[1::3], kept[2::3], strict=True):
        assigned, trained, submitted = (datetime.fromisoformat(event["timestamp"]).timestamp() for event in three)
        found.append(Transfer(trained - assigned - float(three[1]["seconds"]), submitted - trained))
    return found


def _events(daemon: Child) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]


def rows(found: Iterable[dict[str, Any]]) -> list[dict[str, object]]:
    """The rows of docs/measurements/benchmarks.md."""
    return [
        {
            "link": measured["link"],
            "clients": measured["clients"],
            "MB down and up": f"{measured['bytes_down'] / 1e6:.1f}, {measured['bytes_up'] / 1e6:.1f}",
            "download": f"{measured['download_s_median']:.2f} s",
            "upload": f"{measured['upload_s_median']:.2f} s",
            "upload / download": f"{measured['upload_s_median'] / measured['download_s_median']:.2f}",
            "round": f"{measured['round_s_median']:.2f} s",
            "server memory, peak": f"{measured['server_rss_mb']:.0f} MB",
        }
        for measured in found
    ]


if __name__ == "__main__":
    main()
