"""`fl-client privacy` shows the account of a device's data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_client.privacy.account import FILE, Account, write_account
from fl_client.setup import commands
from fl_common.privacy.accountant import Mechanism


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
    write_account(tmp_path / FILE, account)
    assert commands.main(["privacy", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("40 steps with noise_multiplier 1 at rate 0.1\nepsilon 5.435 at delta 1e-05, of 8 ")
    assert account.secret.hex() not in shown
    assert commands.main(["privacy", "--config", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["max_epsilon"], found["spent"][0]["steps"]) == (8.0, 40)
    assert found["epsilon"] == account.epsilon()
    assert commands.main(["privacy", "--config", str(config), "--delta", "2"]) == 2
    (tmp_path / FILE).write_text("{}")
    assert commands.main(["privacy", "--config", str(config)]) == 2
    assert "restore the newest copy of it" in capsys.readouterr().err
