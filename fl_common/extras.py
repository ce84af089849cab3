"""Which extra of this package has a library that is not installed, and how it is installed.

A device needs neither the ledger nor the web page, so their libraries are extras of pyproject.toml.
"""

from __future__ import annotations

from importlib.util import find_spec

SERVER = ("sqlalchemy", "alembic", "jwt", "grpc_reflection")
"""Import names of the extra "server", which the coordinator and simulations need."""


def install_hint(extra: str) -> str:
    """The command that adds an extra to this installation; quoted, because zsh expands brackets.

    pip finds impetus-fl here already and asks the index only for what the extra adds.
    """
    return f"pip install 'impetus-fl[{extra}]'"


def server_packages_missing(program: str) -> str:
    """What to do if packages of the extra "server" are missing, or an empty text. program: who needs them."""
    missing = [name for name in SERVER if find_spec(name) is None]
    return f"{program} needs {', '.join(missing)}, not installed here: {install_hint('server')}" if missing else ""
