"""What can go wrong for an operator, and the exit code that scripts see.

OpsError
├── Refused       the coordinator said no, or the work failed
├── Misused       the command line or a configuration is wrong
├── Unreachable   no coordinator answers
├── NotAllowed    the certificate or its role does not allow it
└── NotFound      no such run, client or round
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command. They do not change."""

    OK = 0
    REFUSED = 1
    MISUSED = 2
    UNREACHABLE = 3
    NOT_ALLOWED = 4
    NOT_FOUND = 5
    RUN_STOPPED = 6
    RUN_FAILED = 7
    INTERRUPTED = 130


class OpsError(Exception):
    """Ends a command. Its text says what was expected, what came and what to do."""

    code = Exit.REFUSED


class Refused(OpsError):
    """The coordinator refused, or what it sent was not usable."""


class Misused(OpsError):
    """The command line, a configuration file or a value in it is wrong."""

    code = Exit.MISUSED


class Unreachable(OpsError):
    """Nothing that could answer is at the address, or it went away."""

    code = Exit.UNREACHABLE


class NotAllowed(OpsError):
    """The caller is not who the coordinator lets do this."""

    code = Exit.NOT_ALLOWED


class NotFound(OpsError):
    """There is no run, client or round of that name."""

    code = Exit.NOT_FOUND
