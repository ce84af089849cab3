"""Entry point of `fl` and of `python -m fl_ops`."""

import os


def main() -> None:
    """Runs the command of the process's arguments and exits with its code."""
    # What grpc's core would log (a failed handshake) is told by the command's own error; read when grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from fl_ops.cli import app

    app(prog_name="fl")


if __name__ == "__main__":
    main()
