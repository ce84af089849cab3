"""A task that was a script: it parses the command line when it is imported."""

import argparse

from tests.processes.tiny_task import Tiny

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, required=True)
arguments = parser.parse_args()


class AtImport(Tiny):
    """As the other task."""
