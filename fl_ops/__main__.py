"""Entry point of `fl` and of `python -m fl_ops`."""

import os
import sys

from fl_common.certificates.tls_version import set_oldest_tls
from fl_common.program import keep_working_directory_out, quiet_interrupts, require_own_packages, silence_libraries
from fl_ops.admin.tls import oldest_tls
from fl_ops.errors import UsageError


def main() -> None:
    """Run the command line of this process and exit with its code."""
    keep_working_directory_out()
    require_own_packages("fl")
    with quiet_interrupts():
        silence_libraries()
        try:
            set_oldest_tls(oldest_tls(os.environ))
        except UsageError as error:
            print(f"fl: {error}", file=sys.stderr)
            raise SystemExit(error.code) from None
        from fl_ops.commands.cli import app

        app(prog_name="fl")


if __name__ == "__main__":
    main()
