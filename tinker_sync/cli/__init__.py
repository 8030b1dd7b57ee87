"""The command line, `tinker-sync`.

Commands parse, call one method of a client and print; see `main.py` for how they are found, `output.py` for
how they print and `failures.py` for exit codes. This module alone loads without the extra `cli`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]

_NEEDED = ("click", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; None takes the arguments of this process.

    >>> main(["version"])
    tinker-sync ...
    0
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"tinker-sync: the command line needs {' and '.join(missing)}.\n"
            "Install them with: pip install 'tinker-sync[cli]'\n"
        )
        return 1
    from tinker_sync.cli.main import run

    return run(arguments)
