"""The steps of `fl ca rotate` with the coordinator's answers: a step is refused while it would lock devices out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from fl_common.certificates.pem import fingerprint
from fl_common.units import counted
from fl_ops.certificates.rotation import Rotation, Stage
from fl_ops.commands.options import Context
from fl_ops.errors import Refused, UsageError
from protos.fl.v1 import admin_pb2

_FORCE = "--force goes on without them, and they need a new token"


@dataclass(frozen=True)
class Changing:
    """A change of one authority of a folder, with the coordinator that uses it."""

    context: Context
    directory: Path
    role: str
    """The role of an authority of `fl ca limited`; empty: the first one."""
    days: int
    force: bool

    def step(self, *, finish: bool) -> tuple[str, dict[str, Any]]:
        """Do the next step. Returns what to do now, in words and as JSON values. Raises an OpsError."""
        rotation = Rotation.of(self.directory, self.role)
        if finish:
            return self._finish(rotation)
        if rotation.stage is Stage.SINGLE:
            if rotation.left_over:
                rotation.finish()
            return self._begun(rotation.begin(self.days))
        if rotation.stage is Stage.TRUSTED:
            rotation = rotation.begin(self.days)
            self._check_trusted(rotation)
        return self._signing(rotation, rotation.sign())

    def _begun(self, rotation: Rotation) -> tuple[str, dict[str, Any]]:
        assert rotation.new is not None  # noqa: S101 - it was just made
        text = (
            f"both authorities are trusted; the old one signs\n{self._files('certificate alone')}\n"
            f"sites whose policy names the authority add {fingerprint(rotation.new)}\n"
            "then, when the devices have renewed their certificates: fl ca rotate"
        )
        return text, _facts(rotation)

    def _signing(self, rotation: Rotation, again: Sequence[str]) -> tuple[str, dict[str, Any]]:
        signed = f"; it signed {counted(len(again), 'certificate')} here again: {', '.join(again)}" if again else ""
        text = (
            f"the new authority signs{signed}\n{self._files('certificate and key')}\n"
            "then, when the devices have renewed their certificates: fl ca rotate --finish"
        )
        rotation = Rotation.of(self.directory, self.role)
        return text, {**_facts(rotation), "signed_again": list(again)}

    def _finish(self, rotation: Rotation) -> tuple[str, dict[str, Any]]:
        if rotation.stage is Stage.TRUSTED:
            raise UsageError("expected a new authority that signs, and it does not yet: `fl ca rotate` makes it sign")
        if rotation.stage is Stage.SINGLE and not rotation.left_over:
            raise UsageError(f"{rotation.directory / rotation.stem}.crt has one authority: there is nothing to finish")
        if rotation.stage is Stage.SIGNING:
            rotation.sign()  # what a kill has left
            self._check_unused(rotation.old)
        rotation.finish()
        text = f"the old authority is dropped\n{self._files('certificate')}"
        return text, _facts(Rotation.of(self.directory, self.role))

    def _files(self, changed: str) -> str:
        return f"copy what has changed in {self.directory} ({changed}) to the machines that have copies of it"

    def _check_trusted(self, rotation: Rotation) -> None:
        """Raises Refused while a device would not trust a coordinator of the new authority."""
        if self.force or rotation.new is None:
            return
        known, name = self._known(), fingerprint(rotation.new)
        new = known.get(name)
        if new is None or not new.accepted:
            raise Refused(
                f"the coordinator does not trust the new authority yet ({name[:16]}...): copy "
                f"{rotation.directory / rotation.stem}.crt to it (tls.client_ca, enrollment.ca_cert), and wait for "
                "certificates_renewed in its log"
            )
        if new.given and new.strangers:
            raise Refused(
                f"{_some(new.strangers, new.stranger_names)} without trust in the new authority: daemons get it when"
                f" they renew their certificates, devices with files of their own when you copy it there. {_FORCE}"
            )

    def _check_unused(self, authority: x509.Certificate) -> None:
        """Raises Refused while something depends on the old authority."""
        if self.force or (old := self._known().get(fingerprint(authority))) is None:
            return  # the coordinator has dropped it
        if old.signs or old.signed_coordinator:
            what = "signs devices with" if old.signs else "shows a certificate of"
            raise Refused(f"the coordinator still {what} the old authority: copy the files of {self.directory} to it")
        if old.dependents:
            raise Refused(
                f"{_some(old.dependents, old.dependent_names)} with need of the old authority: daemons get a new"
                f" certificate when they renew theirs. {_FORCE}"
            )

    def _known(self) -> dict[str, admin_pb2.Authority]:
        response = self.context.call(admin_pb2.ListAuthoritiesRequest(), admin_pb2.ListAuthoritiesResponse)
        return {known.fingerprint: known for known in response.authorities}


def _some(count: int, names: Sequence[str]) -> str:
    """So many devices, with the first names: "3 devices (a, b and 1 more)"."""
    more = f" and {count - len(names):,} more" if count > len(names) else ""
    return f"{counted(count, 'device')} ({', '.join(names)}{more})"


def _facts(rotation: Rotation) -> dict[str, Any]:
    return {
        "stage": rotation.stage.value,
        "old": fingerprint(rotation.old),
        "new": None if rotation.new is None else fingerprint(rotation.new),
    }
