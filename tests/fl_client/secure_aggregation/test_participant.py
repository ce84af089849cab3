"""A device in rounds with secure aggregation: what its policy and its memory refuse, and an old copy of its state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509 import load_der_x509_certificate
from structlog.testing import capture_logs

from fl_client.errors import WorkFailed
from fl_client.policy.config import Policy
from fl_client.secure_aggregation.members import Members
from fl_client.secure_aggregation.participant import PROTOCOL, Participant
from fl_client.storage.pending_updates import Update
from fl_common.certificates.pem import Pem
from fl_common.secure_aggregation.rounding import RoundedPayload, Rounding
from fl_common.secure_aggregation.signatures import Trust
from fl_common.secure_aggregation.terms import Place, Settings, Terms
from fl_ops.certificates import ca
from protos.fl.v1 import training_pb2
from protos.fl.v1.training_pb2 import SecureStage, StageMessage
from tests.fl_common.secure_aggregation.federation import NOW, Federation, authority, names, signer

CLIENT, RUN = "c000", "run"
ROUNDING = Rounding(8, "00" * 32, (RoundedPayload("delta", 1.0),)).to_text()


def terms_of(round_: int = 0, draw: int = 0, settings: Settings | None = None) -> Terms:
    """Terms for three clients."""
    return Terms(Place(RUN, round_, draw), 0, names(3), 4, 16, 3, settings or Settings(), ROUNDING)


def assignment_of(terms: Terms, seed: int = 1) -> training_pb2.Assignment:
    """The work for a round. seed: of the batches."""
    made = training_pb2.Assignment(
        key=training_pb2.ExchangeKey(run_id=RUN, round=terms.place.round),
        training=training_pb2.LocalTraining(learning_rate=0.1, seed=seed),
    )
    made.secure_aggregation.protocol = PROTOCOL
    made.secure_aggregation.terms = terms.to_bytes()
    return made


class Device:
    """A participant whose files are real, and whose coordinator only notes the answers."""

    def __init__(self, folder: Path, policy: dict[str, Any] | None = None) -> None:
        self.answers: list[StageMessage] = []
        pem = ca.certificate_pem(authority("Clients").certificate)
        chain = b"".join(ca.certificate_pem(load_der_x509_certificate(der)) for der in signer(CLIENT).chain)
        key = signer(CLIENT).key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        site: Any = SimpleNamespace(
            policy=Policy.model_validate(policy or {}), trust_of_clients=lambda _: Trust.of_authorities(pem, "outside")
        )
        disk: Any = SimpleNamespace(required=self._required)
        link: Any = SimpleNamespace(ask=self._ask)
        self.part = Participant(
            lambda: Members(folder, CLIENT), lambda: Pem(chain, key, pem), disk, site, link
        )  # fmt: skip

    @staticmethod
    async def _required(function: Callable[[], Any]) -> Any:
        return function()

    async def _ask(self, request: Any, response: Any) -> Any:
        self.answers.append(request.answer)
        return response(wanted=True)

    async def round(self, terms: Terms, seed: int = 1) -> bytes:
        """The masked update of a whole round with two other clients."""
        assignment, others = assignment_of(terms, seed), names(3)[1:]
        await self.part.begin(assignment)
        federation = Federation(terms)
        collector = federation.collector
        collector.add_keys(CLIENT, self.answers[-1].content, NOW)
        federation._keys(others)
        await self.told(terms, SecureStage.SECURE_STAGE_SHARES, federation.key_list)
        collector.add_shares(CLIENT, self.answers[-1].content)
        federation._shares(others)
        await self.told(terms, SecureStage.SECURE_STAGE_MASKED, federation.deliveries[CLIENT])
        header = training_pb2.UpdateHeader(num_examples=3, num_steps=8, training_loss=0.5)
        update = await self.part.masked(assignment, Update(b"", header, (np.arange(4, dtype=np.int32).tobytes(),)))
        assert (update.header.num_examples, update.header.num_steps) == (1, 1)
        assert not update.header.HasField("training_loss")
        return b"".join(bytes(piece) for piece in update.pieces)

    async def told(self, terms: Terms, stage: SecureStage, content: bytes) -> None:
        """A message of the coordinator."""
        key = training_pb2.ExchangeKey(run_id=RUN, round=terms.place.round)
        await self.part.answer(StageMessage(key=key, draw=terms.place.draw, stage=stage, content=content))

    async def refused(self, terms: Terms, seed: int, text: str) -> None:
        """Assert that the device does not even make keys."""
        before = len(self.answers)
        with pytest.raises(WorkFailed, match=text):
            await self.part.begin(assignment_of(terms, seed))
        assert len(self.answers) == before


async def test_the_same_batches_in_another_draw_are_refused(tmp_path: Path) -> None:
    """The second sum would be over the same update. A draw with another seed is answered, also after a restart."""
    device = Device(tmp_path)
    assert len(await device.round(terms_of())) == terms_of().size_bytes
    for terms in (terms_of(draw=1), terms_of(round_=1)):
        await device.refused(terms, 1, "work: expected new work")
    killed = Device(tmp_path)
    await killed.refused(terms_of(draw=1), 1, "work: expected new work")
    await killed.refused(terms_of(settings=Settings(max_dropped=0.2)), 2, "cohort: ")
    await killed.round(terms_of(draw=1), seed=2)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"secure_aggregation": {"min_clients": 4}}, "floor: expected a cohort of at least 4 clients, got 3"),
        ({"work": {"min_clients": 5}}, "floor: expected a cohort of at least 5 clients, got 3"),
        ({"secure_aggregation": {"max_corrupt": 0.2}}, "floor: expected a max_corrupt of at least 0.2, got 0.1"),
    ],
)
async def test_floors_of_the_site(tmp_path: Path, policy: dict[str, Any], text: str) -> None:
    """Here a device can check them, and does not rely on the coordinator's word."""
    await Device(tmp_path, policy).refused(terms_of(), 1, text)


async def test_a_restored_state_directory_refuses_one_round(tmp_path: Path) -> None:
    """Of a run that the copy knows, and of one that it does not know."""
    folder, copy = tmp_path / "state", tmp_path / "copy"
    await Device(folder).round(terms_of())
    shutil.copytree(folder, copy)
    with capture_logs() as logs:
        device = Device(copy)
        await device.refused(terms_of(draw=1), 2, "restored: ")
    assert [line["runs"] for line in logs if line["event"] == "state_restored"] == [1]
    await device.refused(terms_of(draw=2), 3, "restored: ")
    await Device(copy).round(terms_of(round_=1), seed=4)
    (unknown,) = copy.glob("*.member")
    unknown.unlink()
    await Device(copy).refused(terms_of(round_=1), 5, "restored: ")


async def test_messages_of_many_runs_are_not_kept(tmp_path: Path) -> None:
    """A message may come before its assignment; a coordinator that names runs without end fills no memory."""
    device = Device(tmp_path)
    for number in range(100):
        key = training_pb2.ExchangeKey(run_id=f"run-{number}")
        await device.part.answer(StageMessage(key=key, stage=SecureStage.SECURE_STAGE_SHARES, content=b"x"))
    assert [draw.key[0] for draw in device.part._waiting] == [f"run-{number}" for number in range(84, 100)]


async def test_a_device_says_what_protects_it_once(tmp_path: Path) -> None:
    """The log has the sentence for the authority that holds."""
    device = Device(tmp_path)
    with capture_logs() as logs:
        await device.part.begin(assignment_of(terms_of()))
        await device.part.begin(assignment_of(terms_of()))
    said = [line for line in logs if line["event"] == "secure_aggregation"]
    assert [(line["authority"], line["log_level"]) for line in said] == [("outside", "info")]
    assert "cannot invent" in said[0]["protection"]
