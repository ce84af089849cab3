"""Entry point of `fl` and of `python -m fl_ops`."""

from fl_ops.cli import app


def main() -> None:
    """Runs the command of the process's arguments and exits with its code."""
    app(prog_name="fl")


if __name__ == "__main__":
    main()
