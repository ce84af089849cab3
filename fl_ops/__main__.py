"""Entry point of `fl` and of `python -m fl_ops`."""

import os

from fl_common.program import quiet_interrupts


def main() -> None:
    """Run the command line of this process and exit with its code."""
    with quiet_interrupts():
        # Silences the logs of grpc's core: the command prints its own error. grpc reads this when it is imported.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from fl_ops.commands.cli import app

        app(prog_name="fl")


if __name__ == "__main__":
    main()
