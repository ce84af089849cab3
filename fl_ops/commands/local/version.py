"""`fl version`: this command's version, the protocol's and Python's."""

from __future__ import annotations

import platform

from fl_common.program import version_text
from fl_ops.commands.options import Context, command
from fl_ops.environment import package_version
from fl_ops.render import output
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN


@command
def show_version(context: Context) -> None:
    """Show the versions of this command, of the protocol and of Python."""
    impetus = package_version("impetus-fl")
    facts = {"impetus": impetus, "protocol": [PROTOCOL_MIN, PROTOCOL_MAX], "python": platform.python_version()}
    output.show(facts, version_text((PROTOCOL_MIN, PROTOCOL_MAX)), context.as_json)
