"""An authority of another program: OpenSSL's command line, as docs/security/certificates.md shows it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fl_ops.admin.settings import Certificates


class OpensslAuthority:
    """A site's own authority in a folder, which signs for clients. The coordinator has its certificate only."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        folder.mkdir()
        self.folder, self.ca = folder, folder / "site.crt"
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        self._openssl(
            "req", "-x509", *key, "-keyout", "site.key", "-subj", "/CN=Site", "-days", "30", "-out", "site.crt"
        )

    def issue(self, name: str) -> Certificates:
        """A client's certificate and key."""
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        self._openssl("req", "-new", *key, "-keyout", f"{name}.key", "-subj", f"/CN={name}", "-out", f"{name}.csr")
        names = f"subjectAltName=URI:fl://client/{name}\nextendedKeyUsage=clientAuth\n"
        (self.folder / f"{name}.ext").write_text(names)
        files = ("-in", f"{name}.csr", "-extfile", f"{name}.ext", "-out", f"{name}.crt")
        self._openssl("x509", "-req", *files, "-CA", "site.crt", "-CAkey", "site.key", "-days", "1", "-CAcreateserial")
        key_file = self.folder / f"{name}.key"
        key_file.chmod(0o600)
        return Certificates(self.ca, self.folder / f"{name}.crt", key_file)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)
