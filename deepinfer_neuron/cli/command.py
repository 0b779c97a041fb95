"""What every command of the command line consists of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command: its name, its one-line help, its options, and what it does.

    ``run`` returns the exit code. The command modules import torch and the engine inside ``run``
    only, so that ``--help`` answers at once.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
