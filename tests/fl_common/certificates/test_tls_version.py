"""The order of the version and the import of grpc. tests/integration/access/test_tls_versions.py has the handshakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fl_common.certificates.tls_version import check_oldest_tls


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, without the variable."""
    module = "fl_common.certificates.tls_version"
    start = f"from {module} import *; from {module} import VARIABLE; import os\n"
    command = [sys.executable, "-c", f"import os; os.environ.pop('GRPC_SSL_CIPHER_SUITES', 0); {start}{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "code", ["import grpc; set_oldest_tls('1.3')", "check_oldest_tls('1.3')"], ids=["too-late", "never-set"]
)
def test_a_process_without_the_limit_makes_no_connection(code: str) -> None:
    """A version that cannot take effect is an error and not a weaker connection."""
    done = run(code)
    assert "RuntimeError: expected set_oldest_tls('1.3') before grpc" in done.stderr


def test_the_version_may_be_changed_until_grpc_is_imported() -> None:
    """`fl-client doctor` starts with 1.3 and reads its settings afterwards."""
    done = run("set_oldest_tls('1.3'); check_oldest_tls('1.3'); set_oldest_tls('1.2'); print(VARIABLE in os.environ)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_tests_have_the_limit_too() -> None:
    """Servers and channels in the tests' own process behave as those of the programs; the check raises otherwise."""
    check_oldest_tls("1.3")
