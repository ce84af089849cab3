"""The rows of the device's audit log: what was asked for and what was done, in words.

registered          a coordinator accepted this device: its id, address and CA
coordinator_refused the site's policy does not allow the coordinator
certificate_used    this device connects with another certificate than before
assigned, evaluation_assigned    work that the coordinator asked for
refused             the site's policy refused work; the detail has the rule
failed              other work that was not done
trained, submitted, update_refused, evaluated    what was done and sent, and what became of it at once
outcome             whether an update counted
cancelled, run_ended    the coordinator took work back
"""

from __future__ import annotations

import hashlib

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fl_client.audit.log import DeviceAudit
from fl_client.storage.pending_updates import key_of
from protos.fl.v1 import coordinator_pb2, training_pb2


def subject_of(key: tuple[str, int, int]) -> str:
    """The key of an assignment as the text run/round/exchange."""
    return "/".join(map(str, key))


def note_registered(audit: DeviceAudit, response: coordinator_pb2.RegisterResponse, ca: bytes) -> None:
    """A coordinator accepted this device. ca: the trusted CAs in PEM; empty in plain text."""
    audit.coordinator = f"coordinator:{response.coordinator_id}"
    prints = ", ".join(_fingerprints(ca)) or "none, in plain text"
    audit.note("registered", response.coordinator_id, detail=f"protocol {response.protocol}, CA {prints}")


def note_certificate(audit: DeviceAudit, pem: bytes) -> None:
    """This device connects with this certificate; one row for each."""
    if pem == audit.certificate:
        return
    audit.certificate = pem
    try:
        leaf = x509.load_pem_x509_certificate(pem)
    except ValueError:
        return  # the connection names the problem
    ends = f"ends {leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
    audit.note("certificate_used", f"{leaf.serial_number:x}", detail=ends)


def note_assigned(audit: DeviceAudit, assignment: training_pb2.Assignment) -> None:
    """The coordinator asked for training."""
    training = assignment.training
    amount = f"{training.local_steps} steps" if training.local_steps else f"{training.local_epochs} epochs"
    detail = (
        f"attempt {assignment.attempt}, task {assignment.task[:100]} {assignment.fingerprint.source[:100]}, "
        f"algorithm {training.algorithm.name[:100]}, {amount}, batches of {training.batch_size}"
    )
    audit.note("assigned", subject_of(key_of(assignment.key)), detail=detail)


def note_evaluation(audit: DeviceAudit, assignment: training_pb2.EvaluationAssignment) -> None:
    """The coordinator asked for an evaluation."""
    detail = f"task {assignment.task[:100]} {assignment.fingerprint.source[:100]}"
    audit.note("evaluation_assigned", subject_of(key_of(assignment.key)), detail=detail)


def _fingerprints(pem: bytes) -> list[str]:
    """SHA-256 of each certificate (DER) in hex."""
    try:
        found = x509.load_pem_x509_certificates(pem) if pem else []
    except ValueError:
        return ["unreadable"]
    return [hashlib.sha256(each.public_bytes(Encoding.DER)).hexdigest() for each in found]
