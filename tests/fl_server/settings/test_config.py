"""server.toml: errors name the mistake, and plain text needs an explicit setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_common.settings import SettingsError, read_settings
from fl_server.__main__ import EXIT_UNUSABLE, main
from fl_server.settings.config import ServerConfig
from protos.wire import CHUNK_BYTES

GOOD = """
state_dir = "state"
insecure = true
[limits]
stall_s = 30
"""
TLS = '[tls]\ncert = "c.pem"\nkey = "k.pem"\n'
CA = TLS + 'client_ca = "ca.pem"\n'
NO_CA = TLS + "no_client_certificates = true\n"


def load(tmp_path: Path, text: str) -> ServerConfig:
    """The settings of a file with this text."""
    path = tmp_path / "server.toml"
    path.write_text(text)
    return read_settings(path, ServerConfig)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    """Given settings, and defaults for the others."""
    config = load(tmp_path, GOOD)
    assert (config.listen, config.admin_listen, config.metrics_listen) == (
        "127.0.0.1:7070", "127.0.0.1:7071", "127.0.0.1:7072",
    )  # fmt: skip
    assert (config.limits.stall_s, config.limits.chunk_bytes, config.durability) == (30.0, CHUNK_BYTES, "process")


def test_no_metrics(tmp_path: Path) -> None:
    """An empty address turns metrics off."""
    assert load(tmp_path, 'metrics_listen = ""\n' + GOOD).metrics_listen is None


def test_the_url_of_a_ledger_is_a_secret(tmp_path: Path) -> None:
    """The URL may have a password: neither repr nor str of the settings shows it."""
    config = load(tmp_path, 'ledger = "postgresql://eve:secret@db/fl"\n' + GOOD)
    assert config.ledger is not None
    assert config.ledger.get_secret_value() == "postgresql://eve:secret@db/fl"
    assert "secret" not in f"{config!r} {config}"


def test_no_ledger_url(tmp_path: Path) -> None:
    """Left out or empty, the ledger is the file in the state directory."""
    assert load(tmp_path, GOOD).ledger is load(tmp_path, 'ledger = ""\n' + GOOD).ledger is None


@pytest.mark.parametrize("url", ["mysql://eve:secret@db/fl", "secret", "postgresql+asyncpg://eve:secret@db/fl"])
def test_another_database_is_refused_without_its_password(tmp_path: Path, url: str) -> None:
    """The error has the expected form, but not the value, which may be a secret."""
    with pytest.raises(SettingsError, match=r"ledger: expected a URL such as postgresql://user@host") as caught:
        load(tmp_path, f'ledger = "{url}"\n' + GOOD)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("insecure = true", "state_dir: expected a value, found none"),
        (
            'tasks = ["digits"]\nstate_dir = "s"\ninsecure = true',
            "tasks.0: expected module:attribute, such as \"my_task:Wine\", got 'digits': built-in tasks and",
        ),
        ('tasks = ["my_task:*"]\nstate_dir = "s"\ninsecure = true', "tasks.0: expected module:attribute"),
        ("insecur = true\n" + GOOD, "insecur: unknown key, did you mean insecure?"),
        (GOOD + "stalls = 3", "limits.stalls: unknown key, did you mean stall_s?"),
        (GOOD + "xyz = 3", "limits.xyz: unknown key, expected one of max_update_mib, max_model_mib"),
        ('listen = "7070"\n' + GOOD, "listen: expected host:port with a port up to 65535"),
        ('metrics_listen = ":7"\n' + GOOD, "metrics_listen: expected host:port"),
        ("threads = 0\n" + GOOD, "threads: expected greater than or equal to 1, got 0"),
        ('durability = "none"\n' + GOOD, "durability: expected 'process' or 'power', got 'none'"),
        ("drain_grace_s = -1\n" + GOOD, "drain_grace_s: expected greater than or equal to 0, got -1"),
        (GOOD + "chunk_bytes = 10", "limits.chunk_bytes: expected greater than or equal to 65536, got 10"),
        (GOOD + "chunk_bytes = 5000000", "limits.chunk_bytes: expected less than or equal to 4194304, got 5000000"),
        (GOOD + "reattach_grace_s = 0", "limits.reattach_grace_s: expected greater than 0, got 0"),
        (GOOD + "reattach_grace_s = inf", "limits.reattach_grace_s: expected a finite number, got inf"),
        ("limits = 3\nstate_dir = 's'\ninsecure = true", "limits: expected"),
    ],
)
def test_errors_name_the_mistake(tmp_path: Path, text: str, message: str) -> None:
    """File, key, expected value, given value."""
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/server.toml: {message}")


STATE = 'state_dir = "s"\n'


OIDC = '\n[oidc]\nissuer = "i"\naudience = "a"\njwks_file = "f"\nroles = {ops = "operator"}\n'
TOKENS = {
    'issuer = "i"': ("", "oidc.issuer: expected a value, found none"),
    'audience = "a"': ('audience = ""', "oidc.audience: expected text of at least 1 characters"),
    'jwks_file = "f"': ("", "oidc: expected jwks_url or jwks_file, and not both"),
    'roles = {ops = "operator"}': ('roles = {ops = "client"}', "oidc.roles.ops: expected 'viewer', 'operator', "),
    "[oidc]": (
        '[oidc]\nalgorithms = ["HS256"]',
        "oidc.algorithms.0: expected 'RS256', 'ES256' or 'EdDSA', got 'HS256'",
    ),
}


@pytest.mark.parametrize("old", TOKENS)
@pytest.mark.parametrize("url", ["http://id.example.org/keys", "https://u:p@id.example.org/keys", "ftp://x/y", "keys"])
def test_settings_of_tokens_that_are_not_safe_are_refused(tmp_path: Path, old: str, url: str) -> None:
    """No secrets as keys, no roles of devices, no plain text to the provider."""
    new, message = TOKENS[old]
    text = STATE + 'token_listen = "h:1"\n' + CA
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text + OIDC.replace(old, new))
    assert message in str(error.value)
    with pytest.raises(SettingsError, match="oidc.jwks_url: expected a URL"):
        load(tmp_path, text + OIDC.replace('jwks_file = "f"', f'jwks_url = "{url}"'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STATE, "expected a [tls] section with cert, key and client_ca"),
        (STATE + "insecure_remote = true", "for plain text on this machine set insecure = true"),
        (STATE + "insecure = true\n" + CA, "insecure and [tls] contradict each other: remove one of them"),
        (STATE + "insecure_remote = true\n" + CA, "insecure and [tls] contradict each other"),
        (STATE + 'insecure = true\nlisten = "0.0.0.0:1"', "listen: plain text on 0.0.0.0:1, which others can reach"),
        (STATE + 'insecure = true\nadmin_listen = "h:1"', "admin_listen: plain text on h:1, which others can reach"),
        (STATE + TLS, "tls.client_ca: expected the CA of clients and admins (`fl ca init` makes one), found none"),
        (STATE + TLS + "no_client_certificates = false", "to accept that, set tls.no_client_certificates = true"),
        (STATE + CA + "no_client_certificates = true", "tls.no_client_certificates = true contradict each other"),
        (STATE + 'admin_listen = "0.0.0.0:1"\n' + NO_CA, "admin_listen: expected an address of this machine only"),
        (STATE + '[tls]\ncert = "c"', "tls.key: expected a value, found none"),
        (STATE + 'token_listen = "h:1"\n' + CA, "token_listen and [oidc]: expected both or none"),
        (STATE + CA + OIDC, "token_listen and [oidc]: expected both or none"),
        (STATE + 'insecure = true\ntoken_listen = "127.0.0.1:1"\n' + OIDC, "token_listen: expected [tls] with it"),
    ],
)
def test_insecure_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Plain text over a network, and callers without certificates, need explicit settings."""
    with pytest.raises(SettingsError) as error:
        load(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "insecure = true",
        'insecure = true\nlisten = "localhost:1"\nadmin_listen = "[::1]:1"',
        'insecure = true\ninsecure_remote = true\nlisten = "0.0.0.0:1"\nadmin_listen = "10.0.0.1:2"',
        'listen = "0.0.0.0:1"\nadmin_listen = "0.0.0.0:2"\n' + CA,
        'listen = "0.0.0.0:1"\n' + NO_CA,
        'token_listen = "0.0.0.0:1"\n' + CA + OIDC,
    ],
    ids=["loopback", "names", "two-settings", "mtls", "tls-and-local-admins", "tokens"],
)
def test_safe_or_explicit_settings_are_accepted(tmp_path: Path, text: str) -> None:
    """Loopback in plain text, certificates on both ports, or plain text with two explicit settings."""
    assert load(tmp_path, STATE + text).state_dir.name == "s"


def test_a_second_file_overrides_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--config` twice, an error in the second file has that file's name."""
    (tmp_path / "server.toml").write_text(GOOD)
    (tmp_path / "site.toml").write_text("[limits]\nstall_s = 0\n")
    assert main(["--config", f"{tmp_path}/server.toml", "--config", f"{tmp_path}/site.toml"]) == EXIT_UNUSABLE
    assert "site.toml: limits.stall_s: expected greater than 0, got 0" in capsys.readouterr().err


ENROLLMENT = '[enrollment]\nca_cert = "ca.crt"\nca_key = "ca.key"\n'


def test_enrollment_has_safe_defaults(tmp_path: Path) -> None:
    """Certificates live for a day, tokens for an hour, and the newest certificate proves its name for a week more."""
    text = 'state_dir = "state"\nenroll_listen = "127.0.0.1:0"\n' + CA + ENROLLMENT
    config = load(tmp_path, text)
    assert config.enrollment is not None
    assert (config.enrollment.lifetime_s, config.enrollment.token_ttl_s) == (86_400, 3_600)
    assert config.enrollment.expired_grace_s == 604_800
    assert load(tmp_path, 'state_dir = "state"\nenroll_listen = ""\n' + CA).enroll_listen is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('enroll_listen = "127.0.0.1:0"\n' + CA, "expected \\[enrollment\\] with ca_cert and ca_key"),
        ("insecure = true\n" + ENROLLMENT, "expected \\[tls\\] with client_ca"),
        (NO_CA + ENROLLMENT, "expected \\[tls\\] with client_ca"),
        (CA + ENROLLMENT + "lifetime_s = 5\n", "enrollment.lifetime_s"),
        (CA + '[enrollment]\nca_cert = "ca.crt"\n', "enrollment.ca_key: expected a value, found none"),
    ],
)
def test_enrollment_needs_all_its_parts(tmp_path: Path, text: str, message: str) -> None:
    """A port without an authority, an authority without TLS, and certificates that end at once."""
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, 'state_dir = "state"\n' + text)
