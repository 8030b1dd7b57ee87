"""The command line, `tinker-sync`.

    main         the table of commands, and the exit code of a run
    framework    groups that load a command when it runs, and the options that all commands share
    commands     one module for each noun: parse, call one client method, print
    output       the printing of results, messages and bars; table lays out tables
    formatting   numbers and times as text
    failures     error texts and exit codes

This module loads without the extra `cli`. One thread runs a command; of this package, only progress bars use
another.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]

_REQUIRED = ("click", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. None stands for the arguments of this process.

    >>> main(["version"])
    tinker-sync ...
    0
    """
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"tinker-sync: the command line needs {' and '.join(missing)}.\n"
            f"Run: pip install {' '.join(missing)}\n"
        )
        return 1
    from tinker_sync.cli.main import run

    return run(arguments)
