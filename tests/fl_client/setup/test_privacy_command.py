"""`fl-client privacy` shows the account of a device's data."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fl_client.audit.file import rows_in
from fl_client.privacy.account import FILE, Account, write_account
from fl_client.privacy.files import AccountFiles
from fl_client.setup import commands
from fl_client.storage.state import StateDir
from fl_common.privacy.accountant import Mechanism
from fl_common.privacy.loss_distributions import tight_epsilon_of


def test_the_account_and_the_limit_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is spent without a file; afterwards each mechanism has a line. The secret is not shown."""
    (tmp_path / "policy.toml").write_text("[privacy]\nmax_epsilon = 8.0")
    config = tmp_path / "client.toml"
    config.write_text(
        f'client_id = "edge-1"\nserver = "127.0.0.1:1"\nstate_dir = "{tmp_path}"\ninsecure = true\n'
        f'policy = "{tmp_path / "policy.toml"}"\n[task]\nname = "digits"\n'
    )
    assert commands.main(["privacy", "--config", str(config)]) == 0
    assert capsys.readouterr().out == "epsilon 0, of 8 that the site allows (privacy.max_epsilon)\n"
    account = Account.new().with_charge(b"a", Mechanism(1.0, 0.1), 40, 1e-5)
    AccountFiles(tmp_path).write(account)
    assert commands.main(["privacy", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("40 steps with noise_multiplier 1 at rate 0.1\nepsilon 5.435 at delta 1e-05 by Renyi ")
    assert f"epsilon {tight_epsilon_of(account.spent, 1e-5):.4g} by dp-accounting's privacy loss" in shown
    assert account.secret.hex() not in shown
    assert commands.main(["privacy", "--config", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["max_epsilon"], found["spent"][0]["steps"]) == (8.0, 40)
    assert found["epsilon"] == account.epsilon()
    assert found["tight_epsilon"] == tight_epsilon_of(account.spent, 1e-5)
    assert commands.main(["privacy", "--config", str(config), "--delta", "2"]) == 2
    (tmp_path / FILE).write_text("{}")
    assert commands.main(["privacy", "--config", str(config)]) == 2
    assert "restore the newest copy of it" in capsys.readouterr().err


def test_an_older_account_is_refused_until_it_is_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner decides to go on with it, or to begin anew; both are shown afterwards. Without an answer nothing is."""
    config = tmp_path / "client.toml"
    config.write_text(
        f'client_id = "edge-1"\nserver = "127.0.0.1:1"\nstate_dir = "{tmp_path}"\ninsecure = true\n'
        '[task]\nname = "digits"\n'
    )
    files = AccountFiles(tmp_path)
    old = Account.new().with_charge(b"a", Mechanism(1.0, 0.1), 40, 1e-5)
    files.write(old.with_charge(b"b", Mechanism(1.0, 0.1), 40, 1e-5))
    write_account(tmp_path / FILE, old)
    flags = ["--config", str(config)]
    assert commands.main(["privacy", *flags]) == 2
    assert "expected 2 charges or more, got an older copy with 1" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert commands.main(["privacy", "reset", *flags]) == 1
    with StateDir(tmp_path):
        assert commands.main(["privacy", "reset", *flags, "--yes"]) == 2
        assert "held by another daemon" in capsys.readouterr().err
    assert commands.main(["privacy", *flags]) == 2
    assert commands.main(["privacy", "reset", *flags, "--keep", "--yes"]) == 0
    assert files.read() == old
    assert commands.main(["privacy", "reset", *flags, "--yes"]) == 0
    rows = [row for row in rows_in(tmp_path) if row.method == "privacy_account_reset"]
    assert [(row.actor, row.detail) for row in rows] == [
        ("owner", "an older copy goes on; 2 charges counted before"),
        ("owner", "a new account begins; 1 charge counted before"),
    ]
    assert files.resets() == 2
    assert capsys.readouterr().out.endswith("the account has 0 charges, epsilon 0\n")
    assert commands.main(["privacy", *flags]) == 0
    assert "the account was reset 2 times" in capsys.readouterr().out
    (tmp_path / FILE).unlink()
    assert commands.main(["privacy", "reset", *flags, "--keep", "--yes"]) == 2
