"""The doctor about certificates that the daemon renews: days are no measure for one that lives for a day."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from fl_client.enrollment.folder import CertificateFolder, checked, new_request
from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.files import check_certificates
from tests.fl_client.enrollment.fake_authority import FakeAuthority
from tests.processes.certificates import Pki


@pytest.mark.parametrize(
    ("begins_h", "ends_h", "level", "words"),
    [
        (0, 24, "OK", "the daemon renews it from"),
        (-17, 7, "OK", "the daemon renews it from"),
        (-23, 1, "WARN", "expected a renewal on"),
        (-25, -1, "FAIL", "fl-client init"),
    ],
)
def test_a_late_renewal_is_a_warning(tmp_path: Path, begins_h: int, ends_h: int, level: str, words: str) -> None:
    """From half of the time between renewal and end on. An ended certificate needs a token."""
    folder = CertificateFolder(tmp_path / "tls")
    life, begins = timedelta(hours=ends_h), timedelta(hours=begins_h, minutes=-5)
    authority, request = FakeAuthority(Pki(tmp_path / "pki"), life=life, begins=begins), new_request()
    folder.install(checked(authority.issued(request.csr), request.key))
    (folder.current / "renewal.json").unlink()
    settings = {"server": "here:7070", "state_dir": tmp_path, "task": {"name": "digits"}}
    config = ClientConfig.model_validate({**settings, "tls": {**folder.files(), "renew": True}})
    (finding,) = [checked for checked in check_certificates(config) if checked.check == "tls.cert"]
    assert finding.level.name == level
    assert words in f"{finding.message} {finding.fix}"
