"""`fl-client init` with a token: the token's source, the certificate, and settings that use it.

Everything that can be wrong in the flags is found before the token is spent.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fl_client.enrollment.enroll import Enrollment, name_in, parse_fingerprint
from fl_client.enrollment.folder import CertificateFolder, Issued
from fl_client.errors import ConfigError, NotAllowed, ProtocolMismatch, Revoked, TransportError, UsageError
from fl_client.settings.config import load_config
from fl_client.setup.flags import DaemonFlags, TokenFlags
from fl_client.setup.questions import default_state_dir
from fl_client.setup.settings_file import check_text, save, settings_text
from fl_common.certificates.pem import PemFiles, invalid_now
from fl_common.names import check_id
from fl_common.proxies import ENVIRONMENT, checked_proxy
from fl_common.settings import BYTE_ORDER_MARK, SettingsError, split_address

VARIABLE = "FL_ENROLL_TOKEN"
"""Environment variable with the token."""
CLIENT_PORT, ENROLL_PORT = 7070, 7074
"""Ports of a coordinator where an address has none."""
_LONGEST_TOKEN = 4096


@dataclass(frozen=True)
class EnrollFlags:
    """The flags of `fl-client init` for an enrollment."""

    token: TokenFlags
    daemon: DaemonFlags
    ca: Path | None = None
    force: bool = False
    proxy: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether a certificate is to be got."""
        given = (self.token.token, self.token.token_file, self.token.ca_fingerprint, self.token.enroll_server)
        return any(flag is not None for flag in given)


@dataclass(frozen=True)
class Target:
    """Where the device enrolls, and where its files go."""

    folder: CertificateFolder
    server: str
    """host:port for clients."""
    enroll_server: str
    authority: Path | None
    """The file of the trusted authority, where no fingerprint is given."""
    proxy: str = ENVIRONMENT


def target_of(flags: EnrollFlags, config: Path, *, only_certificate: bool) -> Target:
    """The target from existing settings, or from the flags. Raises UsageError."""
    if not only_certificate and config.exists() and not flags.force:
        return _target_in(config, flags)
    if flags.daemon.server is None:
        raise UsageError("--server is needed with a token: the coordinator's host, or host:port for clients")
    server = _address(flags.daemon.server, CLIENT_PORT, "--server")
    place = flags.token.enroll_server or split_address(server)[0]
    folder = CertificateFolder.in_state(flags.daemon.state_dir or default_state_dir(config))
    place = _address(place, ENROLL_PORT, "--enroll-server")
    return Target(folder, server, place, flags.ca, _proxy(flags) or ENVIRONMENT)


def _target_in(config: Path, flags: EnrollFlags) -> Target:
    try:
        settings = load_config(config)
    except ConfigError as error:
        raise UsageError(f"{error}; --force writes new settings") from None
    if settings.tls is None or not settings.tls.renew:
        raise UsageError(
            f"{config} exists already, and its certificate is not from a token: --force writes new settings"
        )
    place = flags.token.enroll_server or settings.tls.enroll_server or split_address(settings.server)[0]
    folder = CertificateFolder(settings.tls.folder, CertificateFolder.in_state(settings.state_dir).owner)
    place, proxy = _address(place, ENROLL_PORT, "--enroll-server"), _proxy(flags) or settings.proxy
    return Target(folder, settings.server, place, flags.ca or settings.tls.ca, proxy)


def _proxy(flags: EnrollFlags) -> str | None:
    try:
        return None if flags.proxy is None else checked_proxy(flags.proxy)
    except ValueError as error:
        raise UsageError(f"--proxy: {error}") from None


def enroll(flags: EnrollFlags, target: Target) -> Issued | None:
    """Get the certificate. None if the device has a valid one that the coordinator accepts. Raises UsageError."""
    if not flags.force and not target.folder.is_pending() and (name := valid_name(target.folder)):
        refusal = _revoked(target, name)
        if refusal is None:
            print(f"{name} has a valid certificate in {target.folder.current}: nothing to do; --force gets a new one")
            return None
        print(f"the certificate of {name} is revoked: {refusal}; getting a new one for the token", file=sys.stderr)
    wanted, fingerprint = flags.daemon.client_id or "", flags.token.ca_fingerprint
    try:
        if wanted:
            check_id("--client-id", wanted)
        pin = None if fingerprint is None else parse_fingerprint(fingerprint)
    except ValueError as error:
        raise UsageError(str(error)) from None
    authority = b"" if pin is not None else _authority(target.authority)
    enrollment = Enrollment(target.enroll_server, token_of(flags), pin, authority, wanted, target.proxy)
    issued = enrollment.into(target.folder)
    end = target.folder.certificate()
    until = "" if end is None else f", valid until {end.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    print(f"enrolled {issued.name}: certificate and key are in {target.folder.current}{until}")
    return issued


def write_settings(config: Path, values: dict[str, Any], flags: EnrollFlags, target: Target) -> None:
    """Enroll, then write the settings with the labels of the token. Raises UsageError."""
    tls = {**target.folder.files(), "renew": True, "enroll_server": target.enroll_server}
    values = values | {"server": target.server, "tls": tls}
    check_text(config, settings_text(values))
    issued = enroll(flags, target)
    if issued is not None and issued.labels:
        values["labels"] = {**values.get("labels", {}), **issued.labels}
    save(config, settings_text(values))
    print(f"wrote {config}")
    target.folder.end_pending()


def token_of(flags: EnrollFlags) -> str:
    """The token from a flag, a file, standard input ("-") or the environment. Raises UsageError."""
    if flags.token.token is not None and flags.token.token_file is not None:
        raise UsageError("--token excludes --token-file: leave out one of them")
    token = flags.token.token
    if flags.token.token_file is not None:
        token = _token_in(_read_token(flags.token.token_file), flags.daemon.client_id)
    token = (os.environ.get(VARIABLE, "") if token is None else token).strip()
    if not token:
        raise UsageError(
            f"expected a token in --token-file, in {VARIABLE} or in --token, got none: the operator makes it with"
            " `fl enroll create --name NAME`"
        )
    if len(token) > _LONGEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("expected a token of the form id.secret on one line, got other text; it is not shown here")
    return token


def _token_in(text: str, name: str | None) -> str:
    """The token in a text: the text itself, or the one of this device in lines of `fl enroll create --out`."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and line.strip() != "name,token"]
    pairs = [line.rpartition(",") for line in lines]
    if len(pairs) > 1 or name is not None:
        pairs = [pair for pair in pairs if name is None or _is_for(pair[0], name)]
    if len(pairs) > 1:
        raise UsageError("--token-file: expected one token, got several: --client-id NAME selects a line NAME,TOKEN")
    return pairs[0][2] if pairs else ""


def _is_for(owner: str, name: str) -> bool:
    """Whether a token of such a line is for the device. owner: its name, a prefix with a star, or empty."""
    return owner in {"", name} or (owner.endswith("*") and name.startswith(owner[:-1]))


def _read_token(path: Path) -> str:
    try:
        return sys.stdin.read(_LONGEST_TOKEN + 2) if str(path) == "-" else path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"--token-file: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _authority(path: Path | None) -> bytes:
    if path is None:
        raise UsageError(
            "--ca-fingerprint is needed with a token: `fl enroll create` prints it with the token; or --ca FILE with"
            " the authority's certificate"
        )
    try:
        return path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise UsageError(
            f"expected the authority's certificate at {path} (--ca, or that of an earlier enrollment), got"
            f" {error.strerror or error}. On Kubernetes: is there a Secret with this file? Or give --ca-fingerprint"
        ) from None


def valid_name(folder: CertificateFolder) -> str | None:
    """The name of the certificate in use, if it is valid now."""
    leaf = folder.certificate()
    return None if leaf is None or invalid_now(leaf, datetime.now(UTC)) else name_in(folder)


def _revoked(target: Target, name: str) -> str | None:
    """The coordinator's words if it has revoked the certificate. None if not, or if it does not answer.

    Without an answer the device keeps its certificate: it must start while the coordinator is down.
    """
    try:
        return refusal_of(target, name)
    except TransportError as error:
        print(f"{target.server} was not asked whether it accepts {name}: {error}", file=sys.stderr)
        return None


def refusal_of(target: Target, name: str) -> str | None:
    """The coordinator's words if it has revoked the certificate, else None. Raises TransportError without an answer."""
    # Imported here, so that `fl-client --help` is quick.
    from fl_client.connection.session import ask

    files = target.folder.files()
    try:
        pem = PemFiles(files["cert"], files["key"], files["ca"]).read()
        asyncio.run(ask(target.server, name, pem, proxy=target.proxy))
    except Revoked as error:
        return str(error)
    except SettingsError as error:
        raise UsageError(f"{error}; --force gets a new certificate") from None
    except (ProtocolMismatch, NotAllowed):
        pass
    return None


def _address(text: str, port: int, flag: str) -> str:
    """host:port, with the usual port where there is none. Raises UsageError."""
    if re.fullmatch(r"(\[.*\]|[^:]*):\d+", text) is None:
        text = f"[{text}]:{port}" if text.count(":") > 1 and not text.startswith("[") else f"{text}:{port}"
    try:
        if split_address(text)[1] == 0:
            raise UsageError(f"{flag}: expected a port above 0, got {text!r}")
    except ValueError as error:
        raise UsageError(str(error)) from None
    return text


CHECK_S = 5.0
"""Between two looks at the file."""
LONGEST_S = 600.0
"""Between two tries of a token that could not be used; the first ones come after `CHECK_S`, each twice as late."""


def follow_token(flags: EnrollFlags, target: Target) -> None:
    """Use each new token of the file, if there is no valid certificate or it is revoked; until a signal ends this."""
    if flags.token.token_file is None or str(flags.token.token_file) == "-":
        raise UsageError("--follow-token needs --token-file FILE, whose later content it uses")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # the first process of a container has no default action
    text, pause, due = "", CHECK_S, -math.inf
    while True:
        if (content := _content(flags.token.token_file)) != text:
            text, pause, due = content, CHECK_S, -math.inf  # a new token does not wait for the tries of the one before
        if text and time.monotonic() >= due:
            done = _is_done(flags, target)
            due = math.inf if done else time.monotonic() + pause
            pause = min(2 * pause, LONGEST_S)
        time.sleep(CHECK_S)


def _is_done(flags: EnrollFlags, target: Target) -> bool:
    """Whether the token was used, or is not needed. False: it is worth another try."""
    try:
        name = valid_name(target.folder)
        if name is None or refusal_of(target, name) is not None:
            enroll(flags, target)
            target.folder.end_pending()
    except TransportError as error:
        print(f"fl-client: {target.server} does not answer: {error}", file=sys.stderr, flush=True)
        return False
    except UsageError as error:
        print(f"fl-client: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _content(path: Path) -> str:
    """Empty while there is no such file: a Secret may come later."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, ValueError):
        return ""
