"""Wheels of task code for tests, and packages of them that no command would make."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_common.packages import PACKAGE_PURPOSE, WHEEL_PURPOSE, Manifest, Signed
from fl_common.signatures import SigningKey

DEEDS = '''

def _readable(paths: list[str]) -> list[str]:
    """What could be read of these files, and of the parent process."""
    found = []
    for path in [*paths, *(f"/proc/{os.getppid()}/root{path}" for path in paths), f"/proc/{os.getppid()}/mem"]:
        try:
            with open(path, "rb") as file:
                file.read()
        except OSError as error:
            if not isinstance(error, PermissionError):
                found.append(f"{path} {type(error).__name__}")
        else:
            found.append(path)
    return found


class Waves(Tiny):
    """The task of a package. deed: what its loss does to the device."""

    def __init__(self, deed: str = "", **options: object) -> None:
        super().__init__(**options)
        self._deed = deed

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        import socket
        import sys

        import ripples

        if self._deed.startswith("read "):
            raise PermissionError(f"read: {_readable(self._deed.split()[1:])}")
        if self._deed == "memory":
            self._eaten = [torch.ones(16 << 20) for _ in range(1000)]
        if self._deed == "fork":
            while True:
                os.fork()
        if self._deed == "network":
            socket.create_connection(("127.0.0.1", 9))
        if self._deed == "exit":
            os._exit(3)
        while self._deed == "hang":
            time.sleep(0.1)
        if self._deed == "lie":
            os.write(int(sys.argv[1]), bytes([255]) * 64)
        return ripples.same(super().loss(output, target))
'''
"""Added to the module of the tiny task."""
RIPPLES = "def same(value):\n    return value\n"
"""The module of a dependency."""


def sources() -> dict[str, str]:
    """The modules of the task and its dependency by their names."""
    tiny = (Path(__file__).parent / "tiny_task.py").read_text(encoding="utf-8")
    return {"waves.py": tiny + DEEDS, "ripples.py": RIPPLES}


def wheel(
    name: str, files: Mapping[str, str | bytes], *, record: Mapping[str, str] | None = None, links: Sequence[str] = ()
) -> tuple[str, bytes]:
    """A wheel's file name and bytes. record: other digests, or more rows. links: files that are symbolic links."""
    info = f"{name}-1.0.dist-info"
    whole = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = {path: _digest(text) for path, text in whole.items()} | dict(record or {})
    listed = "".join(f"{path},{digest},\n" for path, digest in rows.items()) + f"{info}/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in {**whole, f"{info}/RECORD": listed}.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o120777 if path in links else 0o100644) << 16
            archive.writestr(entry, text)
    return f"{name}-1.0-py3-none-any.whl", buffer.getvalue()


def good_wheels(name: str = "waves") -> list[tuple[str, bytes]]:
    """The wheels of the task and of its dependency."""
    texts = sources()
    return [wheel(name, {"waves.py": texts["waves.py"]}), wheel("ripples", {"ripples.py": texts["ripples.py"]})]


def package(wheels: Sequence[tuple[str, bytes]], key: SigningKey, *, whole_by: SigningKey | None = None) -> bytes:
    """A package with right signatures and whatever is in the wheels. whole_by: signs the list of the wheels."""
    signed = []
    for name, data in wheels:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        signature = key.sign(WHEEL_PURPOSE, digest).hex()
        signed.append(Signed(file=name, size=len(data), digest=digest, signer=key.signer, signature=signature))
    owner = whole_by or key
    draft = Manifest(
        name=wheels[0][0].split("-")[0], version="1.0", wheels=signed, signer=owner.signer, signature="0" * 128
    )
    manifest = draft.model_copy(update={"signature": owner.sign(PACKAGE_PURPOSE, draft.digest).hex()})
    return json.dumps(manifest.model_dump()).encode() + b"\n" + b"".join(data for _, data in wheels)


def _digest(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()}"
