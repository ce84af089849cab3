"""What the three programs share at their start and end: a quiet end at Ctrl-C, imports of our own packages, --version.

It imports little, because it is imported first.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""

UNUSABLE = 2
"""Exit code of a command that cannot start where it is."""


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """End the process with `INTERRUPTED` at Ctrl-C, without a traceback, where the program has no handler of its own.

    Imports take seconds, and an exception in the midst of one can come out as another error. Nothing is left half done:
    at this time a program has written nothing.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # for example ignored, in the background
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        _replace(_end, signal.default_int_handler)


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C again, within `quiet_interrupts`."""
    changed = _replace(_end, signal.default_int_handler)
    try:
        yield
    finally:
        if changed:
            _replace(signal.default_int_handler, _end)


def keep_working_directory_out() -> None:
    """Let no Python that this process starts look for modules in the working directory, before all others.

    `multiprocessing` starts its helpers with `python -c`, which does: a file `signal.py` there would run. Code from
    outside is still found there, last, after all that is installed (`fl_extensions.importing`).
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def require_own_packages(program: str) -> None:
    """End the process with `UNUSABLE` and one sentence if Python finds a package of another project in place of ours.

    `algorithms` and `protos` are names that other projects use too. A folder of theirs is found first where
    `python -m` starts in it or PYTHONPATH names it. program: the command, for the sentence.
    """
    from importlib.util import find_spec  # noqa: PLC0415 - not needed at the import of this module

    ours = Path(__file__).resolve().parents[1]
    for name in ("algorithms", "protos"):
        spec = find_spec(name)
        places = [] if spec is None else [spec.origin] if spec.has_location else spec.submodule_search_locations or []
        folders = [Path(place).resolve() for place in places if place]
        if folders and ours / name not in {folders[0], folders[0].parent}:
            print(  # noqa: T201 - logging is not set up
                f"{program}: expected the package {name} of impetus in {ours / name}, got {folders[0]}, which Python"
                " finds first: rename that folder or file, or start from another folder, without it in PYTHONPATH",
                file=sys.stderr,
            )
            raise SystemExit(UNUSABLE)


def silence_libraries() -> None:
    """Keep the lines of libraries off stderr, where they would stand between lines of JSON: our programs report.

    These are lines of grpc's core, and progress bars and announcements of later versions of Hugging Face's libraries.
    The libraries read the variables when they are imported. Who sets them gets the lines.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")


def impetus_version() -> str:
    """The version of this software: "0.1.0", or "not installed"."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - few programs need it

    try:
        return version("impetus-fl")
    except PackageNotFoundError:
        return "not installed"


def settings_files(
    program: str, arguments: Sequence[str] | None, protocol: tuple[int, int], repeated: str, **texts: str
) -> list[Path]:
    """The files of --config in an order in which later ones win. Ends the process for --help, --version and misuse.

    protocol: as for `version_text`; repeated: what a repeated --config does; texts: arguments of ArgumentParser.
    """
    import argparse  # noqa: PLC0415 - only the programs that serve have these arguments

    parser = argparse.ArgumentParser(program, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)  # type: ignore[arg-type] # texts
    about = f"settings in TOML; repeat it for {repeated}"
    parser.add_argument("--config", type=Path, required=True, action="append", metavar="FILE", help=about)
    parser.add_argument("--version", action="version", version=version_text(protocol))
    given = sys.argv[1:] if arguments is None else list(arguments)
    bare = [text for text in given if text.endswith(".toml")]
    if bare and not {"--config", "-h", "--help"} & {text.partition("=")[0] for text in given}:
        parser.error(f"expected --config before the file, got {bare[0]}: write --config {bare[0]}")
    files: list[Path] = parser.parse_args(given).config
    return files


def version_text(protocol: tuple[int, int]) -> str:
    """For example: impetus 0.1.0, protocol 1 to 2, Python 3.11.7. protocol: the oldest and the newest version."""
    from platform import python_version  # noqa: PLC0415 - only for --version

    return f"impetus {impetus_version()}, protocol {protocol[0]} to {protocol[1]}, Python {python_version()}"


def _replace(old: object, new: object) -> bool:
    if signal.getsignal(signal.SIGINT) is not old:
        return False
    signal.signal(signal.SIGINT, new)  # type: ignore[arg-type] # one of the two functions of this module
    return True


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
