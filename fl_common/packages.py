"""Packages of task code: wheels with their signatures in one file, and the checks that nothing in them gets around.

A package is a line of JSON, its manifest, and the bytes of the wheels, one after the other. Its digest is the SHA-256
of name, version and the list of wheels, so it pins every byte. Each wheel is signed, and so is the whole: a signed
wheel cannot be put into another package.

A wheel has no code that runs when it is installed. What else an installer or a start of Python would do with its files
is refused here before anything is unpacked: see `check_wheel`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import stat
import zipfile
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from fl_common.names import check_id
from fl_common.settings import Section, describe_json_error
from fl_common.signatures import SigningKey, WrongSignature, check_signer, verify

WHEEL_PURPOSE, PACKAGE_PURPOSE = "wheel", "package"
"""What the signatures are for."""
MOST_MANIFEST_BYTES = 64 << 10
MOST_WHEELS = 64
MOST_FILES, MOST_UNPACKED_BYTES = 20_000, 4 << 30
"""Files of a wheel, and bytes of all of them."""
_DIGEST = r"^sha256:[0-9a-f]{64}$"
_WHEEL = re.compile(
    r"[A-Za-z0-9._]+-[A-Za-z0-9._!+]+(-[0-9][A-Za-z0-9._]*)?-[A-Za-z0-9._]+-[A-Za-z0-9._]+-[A-Za-z0-9._]+\.whl"
)
_AT_START = frozenset({"sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize"})


class PackageRefused(Exception):
    """A package must not be used. The text names the package, its signer, its digest and the rule."""

    def __init__(self, rule: str, why: str, manifest: Manifest | None = None) -> None:
        of = "a package" if manifest is None else manifest.title
        super().__init__(f"{of} is refused by the rule {rule}: {why}")
        self.rule = rule
        """A word for the rule."""


def _wheel_name(value: str) -> str:
    if not _WHEEL.fullmatch(value) or len(value) > 256:
        raise ValueError(f"expected the file name of a wheel, got {value!r:.100}")
    return value


class Signed(Section):
    """One wheel of a package."""

    file: Annotated[str, AfterValidator(_wheel_name)]
    size: int = Field(ge=1)
    """Bytes."""
    digest: Annotated[str, Field(pattern=_DIGEST)]
    signer: Annotated[str, AfterValidator(check_signer)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Manifest(Section):
    """What a package has. The first wheel is that of the task, the others are its dependencies."""

    name: Annotated[str, AfterValidator(partial(check_id, "the name of a package"))]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._!+-]{1,64}$")]
    wheels: list[Signed] = Field(min_length=1, max_length=MOST_WHEELS)
    signer: Annotated[str, AfterValidator(check_signer)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]

    @property
    def digest(self) -> str:
        """What the signature of the whole is of, and by which a run and an approval name the package."""
        pinned = self.model_dump(include={"name", "version", "wheels"})
        return _digest(json.dumps(pinned, separators=(",", ":"), sort_keys=True).encode())

    @property
    def title(self) -> str:
        """The package for messages."""
        return f"the package {self.name} {self.version} ({self.digest}, signed by {self.signer})"

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.size for wheel in self.wheels)


def pack(wheels: Sequence[tuple[str, bytes]], key: SigningKey) -> bytes:
    """The file of a package, all of it signed by one key. wheels: names and bytes, that of the task first.

    Raises PackageRefused for wheels that every device would refuse, ValueError for a name that is none of a wheel.
    """
    signed = []
    for name, data in wheels:
        digest = _digest(data)
        signature = key.sign(WHEEL_PURPOSE, digest).hex()
        _wheel_name(name)
        signed.append(Signed(file=name, size=len(data), digest=digest, signer=key.signer, signature=signature))
    dist, version = wheels[0][0].split("-")[:2]
    unsigned = Manifest(name=dist, version=version, wheels=signed, signer=key.signer, signature="0" * 128)
    manifest = unsigned.model_copy(update={"signature": key.sign(PACKAGE_PURPOSE, unsigned.digest).hex()})
    check_wheels(manifest, [data for _, data in wheels])
    head = json.dumps(manifest.model_dump(), separators=(",", ":"), sort_keys=True).encode()
    return b"\n".join([head, b"".join(data for _, data in wheels)])


def unpack(data: bytes) -> tuple[Manifest, list[bytes]]:
    """Manifest and wheels of a file, not trusted yet. Raises PackageRefused unless digests and sizes fit."""
    head, newline, rest = data.partition(b"\n")
    if not newline or len(head) > MOST_MANIFEST_BYTES:
        raise PackageRefused("manifest", f"expected a line of JSON of at most {MOST_MANIFEST_BYTES} bytes")
    try:
        manifest = Manifest.model_validate_json(head)
    except ValidationError as error:
        raise PackageRefused("manifest", describe_json_error(error, Manifest)) from None
    if len(rest) != manifest.size:
        raise PackageRefused("digest", f"expected {manifest.size} bytes of wheels, got {len(rest)}", manifest)
    wheels, start = [], 0
    for wheel in manifest.wheels:
        part = rest[start : start + wheel.size]
        if (came := _digest(part)) != wheel.digest:
            raise PackageRefused("digest", f"expected {wheel.file} with {wheel.digest}, got {came}", manifest)
        wheels.append(part)
        start += wheel.size
    return manifest, wheels


def check_signers(manifest: Manifest, signers: Iterable[str]) -> None:
    """Raises PackageRefused unless the whole and each wheel are signed by keys among these."""
    allowed = sorted(signers)
    parts = [(PACKAGE_PURPOSE, "the package", manifest.digest, manifest.signer, manifest.signature)]
    parts += [(WHEEL_PURPOSE, it.file, it.digest, it.signer, it.signature) for it in manifest.wheels]
    for purpose, what, digest, signer, signature in parts:
        if signer not in allowed:
            named = ", ".join(allowed) or "none"
            why = f"expected {what} ({digest}) with a signature by one of {named}, got {signer}"
            raise PackageRefused("signers", why, manifest)
        try:
            verify(signer, purpose, digest, bytes.fromhex(signature))
        except WrongSignature as error:
            raise PackageRefused("signature", f"{what}: {error}", manifest) from None


def check_wheels(manifest: Manifest, wheels: Sequence[bytes]) -> None:
    """Raises PackageRefused for a wheel that `check_wheel` refuses, and for two with a file of the same name."""
    owner: dict[str, str] = {}
    for signed, data in zip(manifest.wheels, wheels, strict=True):
        try:
            names = check_wheel(signed.file, data)
        except PackageRefused as error:
            raise PackageRefused(error.rule, f"{signed.file}: {error}", manifest) from None
        except (zipfile.BadZipFile, ValueError, KeyError, NotImplementedError, EOFError, OSError) as error:
            raise PackageRefused("wheel", f"{signed.file}: expected a wheel, got {error}", manifest) from None
        for name in names:
            if (before := owner.setdefault(name.casefold(), signed.file)) != signed.file:
                raise PackageRefused("overwrite", f"{signed.file} and {before} both have the file {name}", manifest)


def check_wheel(file: str, data: bytes) -> list[str]:
    """The names of the files in a wheel.

    Refused are: paths that leave the folder, links and devices, two files of one name, files that Python runs at its
    start (.pth, sitecustomize), a folder .data, whose files an installer puts anywhere, what RECORD does not list with
    the same SHA-256, and more than the limits. Raises PackageRefused, and what zipfile raises.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_UNPACKED_BYTES:
            raise PackageRefused("size", f"expected {MOST_FILES} files and {MOST_UNPACKED_BYTES} bytes at most")
        for entry in entries:
            _check_entry(entry)
        names = [entry.filename for entry in entries if not entry.is_dir()]
        if len({name.casefold() for name in names}) != len(names):
            raise PackageRefused("paths", "two files have one name")
        info = "-".join(file.split("-")[:2]).casefold() + ".dist-info"
        (folder,) = {name.partition("/")[0] for name in names if name.partition("/")[0].endswith(".dist-info")}
        if folder.casefold() != info:
            raise PackageRefused("wheel", f"expected the folder {info}, got {folder}")
        _check_record(archive, names, f"{folder}/RECORD")
    return names


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name, parts = entry.filename, entry.filename.rstrip("/").split("/")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if name != entry.orig_filename or "\\" in name or ":" in parts[0] or not name.isprintable():
        raise PackageRefused("paths", f"expected a plain path, got {entry.orig_filename!r:.100}")
    if any(part in {"", ".", ".."} for part in parts):
        raise PackageRefused("paths", f"expected a path inside of the package, got {name!r:.100}")
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR} or entry.flag_bits & 0x1:
        raise PackageRefused("paths", f"expected a file or a folder, got a link, a device or a secret: {name!r:.100}")
    if parts[0].casefold().endswith(".data"):
        raise PackageRefused("data", f"expected no files outside of the package's own folder, got {name!r:.100}")
    if name.casefold().endswith(".pth") or parts[0].casefold() in _AT_START:
        raise PackageRefused("start", f"expected no code that every start of Python runs, got {name!r:.100}")


def _check_record(archive: zipfile.ZipFile, names: Sequence[str], record: str) -> None:
    """Raises PackageRefused unless RECORD lists exactly these files, each with its SHA-256."""
    rows = csv.reader(io.StringIO(archive.read(record).decode("utf-8")))
    listed = {row[0]: row[1] for row in rows if row}
    if set(listed) != set(names):
        odd = min(set(listed) ^ set(names))
        raise PackageRefused("record", f"RECORD and the files differ in {odd!r:.100}")
    for name in names:
        if name == record:
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
        if listed[name] != f"sha256={digest}":
            raise PackageRefused("record", f"expected {name!r:.100} with {listed[name] or 'a digest'}, got {digest}")


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
