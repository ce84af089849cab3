"""A coordinator's runs for notebooks and scripts: `import fl_ops as impetus`. It reads only; `fl` changes things.

Rounds are flat dictionaries, which pandas takes as they are. A model is a state_dict.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fl_common.certificates.tls_version import set_oldest_tls
from fl_common.program import silence_libraries
from fl_ops.admin.tls import oldest_tls
from fl_ops.errors import UsageError

if TYPE_CHECKING:
    import torch

    from fl_ops.admin.client import AdminClient
    from protos.fl.v1 import admin_pb2

Round = dict[str, float | int | str | datetime]


def connect(
    server: str | None = None,
    *,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    key: str | Path | None = None,
    token_file: str | Path | None = None,
    insecure: bool | None = None,
) -> Coordinator:
    """A connection to a coordinator's admin port. What is not given is taken from where `fl` takes it.

    That is: the variables FL_ADMIN, FL_CA, FL_CERT, FL_KEY, FL_TOKEN_FILE and FL_INSECURE, then
    ~/.config/impetus/fl.toml, then 127.0.0.1:7071.

    Args:
        server: host:port.
        ca: certificate of the authority, in PEM.
        cert: your certificate, in PEM.
        key: its private key.
        token_file: a token (OIDC), in place of a certificate.
        insecure: True: plain text, on this machine only.

    Raises:
        fl_ops.errors.UsageError: the values do not fit together, or a file cannot be read. Also if grpc was imported
            before the first call and the connection is not in plain text: then TLS 1.2 could not be refused.
    """
    from fl_ops.admin import settings  # imported here, as all that takes time: every `fl` imports this module

    files = {"ca": ca, "cert": cert, "key": key, "token_file": token_file}
    paths = {name: None if value is None else Path(value) for name, value in files.items()}
    connection = settings.load(settings.Layer(server=server, insecure=insecure, **paths))  # type: ignore[arg-type] # these four are paths
    _set_up_grpc(plain_text=connection.security is None)
    from fl_ops.admin.client import AdminClient  # imported here: grpc reads the settings above when it is imported

    return Coordinator(AdminClient(connection))


def _set_up_grpc(*, plain_text: bool) -> None:
    """What grpc reads when it is imported. Raises UsageError if that was too early for a connection with TLS."""
    silence_libraries()
    try:
        set_oldest_tls(oldest_tls(os.environ))
    except RuntimeError as error:
        if not plain_text:
            raise UsageError(
                "expected fl_ops.connect before anything imports grpc, got it afterwards: move the first connect to "
                "the top of the program"
            ) from error


class Coordinator:
    """A connection; a context manager. Every method raises `fl_ops.errors.OpsError` with what to do."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.__exit__(None, None, None)

    def runs(self) -> list[Run]:
        """All runs that the caller may see, the oldest first."""
        return [Run(self._client, status) for status in self._client.runs.list_runs()]

    def run(self, run_id: str) -> Run:
        """One run. Raises fl_ops.errors.NotFound."""
        return Run(self._client, self._client.runs.get_run(run_id, 0).run)

    def clients(self) -> list[dict[str, Any]]:
        """The registered clients as flat dictionaries, in order of id."""
        from fl_web.facts.client import words

        return [
            {
                "id": client.client_id,
                "state": ", ".join(words(client)),
                "run": client.run_id,
                "counted": client.updates_counted,
                "refused": client.work.refused,
                "failed": client.work.failed,
                "assignments": client.work.assignments,
                "work_s": client.work.work_s if client.work.HasField("work_s") else None,
                "transfer_s": client.work.transfer_s if client.work.HasField("transfer_s") else None,
                "came_last": client.work.rounds_last / client.work.rounds if client.work.rounds else None,
                "attention": "; ".join(need.why for need in client.attention),
                "examples": sum(offer.train_examples for offer in client.tasks),
                "last_seen": client.last_seen.ToDatetime(tzinfo=UTC),
                **{f"label_{name}": value for name, value in sorted(client.labels.items())},
            }
            for client in self._client.clients.list_clients()
        ]


class Run:
    """A run as it was when it was read; `refresh` reads it again."""

    def __init__(self, client: AdminClient, status: admin_pb2.RunStatus) -> None:
        self._client = client
        self.status = status
        """The coordinator's message (protos/fl/v1/admin.proto), for all that has no attribute here."""

    def __repr__(self) -> str:
        from fl_common.units import counted

        return f"Run({self.id!r}, {self.state}, {counted(self.rounds_done, 'round')})"

    @property
    def id(self) -> str:
        """Its name at the coordinator."""
        return self.status.run_id

    @property
    def state(self) -> str:
        """One of "waiting", "running", "paused", "completed", "stopped", "failed" and "not loaded"."""
        from fl_web.facts.words import run_state

        return run_state(self.status.state)

    @property
    def rounds_done(self) -> int:
        """The number of committed rounds."""
        return self.status.rounds_done

    @property
    def settings(self) -> dict[str, Any]:
        """The run's file with all defaults, as nested dictionaries."""
        from google.protobuf.json_format import MessageToDict

        return dict(MessageToDict(self.status.spec, preserving_proto_field_name=True))

    def refresh(self) -> Self:
        """Read the run's state again; returns the run."""
        self.status = self._client.runs.get_run(self.id, 0).run
        return self

    def rounds(self, newest: int | None = None) -> list[Round]:
        """The committed rounds, one flat dictionary each, in order. newest: only so many; None: all.

        Each has "round" (from 0), "committed" (a datetime in UTC), "model_digest", "averaged_digest" and the values of
        docs/operation/trackers.md under names for columns: evaluation/accuracy is "accuracy", norms/cosine is
        "norms_cosine". A value that a round does not have is left out; pandas fills it with NaN.
        """
        return [_flat(summary) for summary in self._client.runs.get_run(self.id, newest).rounds]

    def watch(self) -> Iterator[Round]:
        """Each round when it is committed, and again when it is evaluated, until the run ends.

        Raises fl_ops.errors.Unreachable if the connection is lost.
        """
        for event in self._client.runs.watch_run(self.id):
            if event.HasField("round"):
                yield _flat(event.round)
        self.refresh()

    def evaluations(self, number: int | None = None) -> list[dict[str, Any]]:
        """Each client's evaluation of a round's model. number: of the round; None: the newest evaluated one.

        Flat dictionaries with "client", "examples" and the task's metrics, in order of client id.
        """
        evaluations = self._client.runs.list_evaluations(self.id, number)
        return [
            {"client": row.client_id, "examples": row.num_examples, **dict(sorted(row.metrics.items()))}
            for row in evaluations.evaluations
        ]

    def model(self, which: str | int = "latest", *, averaged: bool = False) -> dict[str, torch.Tensor]:
        """A committed model as a state_dict on the CPU, checked against its digest.

        which: "latest", "best" or a round's number. averaged: the averaged model of that round. The model of a run with
        `frozen = "local"` has no frozen parameters: load it with `strict=False`.
        """
        from safetensors.torch import load_file

        from fl_ops.exports.download import receive
        from fl_ops.files import Target

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            model = "averaged" if averaged else "committed"
            receive(self._client.models.export_model(self.id, str(which), model), Target(path))
            return load_file(path)


def _flat(summary: admin_pb2.RoundSummary) -> Round:
    from fl_web.facts.rounds import Round, column, last_epoch

    values = {**Round.of(summary).values(), **last_epoch(summary)}
    return {
        "round": summary.round,
        "committed": summary.committed.ToDatetime(tzinfo=UTC),
        "model_digest": summary.model_digest,
        **({"averaged_digest": summary.averaged_digest} if summary.averaged_digest else {}),
        **{column(name): value for name, value in values.items()},
    }
