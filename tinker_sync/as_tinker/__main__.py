"""`python -m tinker_sync.as_tinker`: runs Python with this package in the place of `tinker`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tinker_sync
from tinker_sync.as_tinker import FOLDER

_USAGE = """usage: python -m tinker_sync.as_tinker script [arguments]
       python -m tinker_sync.as_tinker -m module [arguments]
       python -m tinker_sync.as_tinker -c code [arguments]

Runs Python, and the Python processes that the program starts, with `import tinker` meaning tinker_sync."""


def _options(given: list[str]) -> list[str]:
    """Return the options for the interpreter itself. The last one, `m`, may share its word with its value.

    >>> _options(["-X", "dev", "-m", "a.b"]), _options(["-um", "a.b"]), _options(["-ma.b"])
    (['-X', 'dev'], ['-u'], [])
    """
    *options, last = given
    if not last.startswith("-"):
        last = options.pop()
    kept = last[: last.index("m")]
    return options if kept == "-" else [*options, kept]


def main() -> None:
    """Replace this process with a Python that runs the arguments."""
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit(_USAGE)
    if arguments[0] in ("-h", "--help"):
        print(_USAGE)  # noqa: T201
        return
    if sys.flags.ignore_environment:
        sys.exit("as_tinker: the options -E and -I make Python ignore PYTHONPATH, which this needs")
    folders = [FOLDER]
    root = str(Path(tinker_sync.__file__).parents[1])
    path = [each for each in sys.path if each != FOLDER]
    if root not in path[1:]:  # only `-m` has put it on the path, because it is the present folder
        folders.append(root)
    if inherited := os.environ.get("PYTHONPATH"):
        folders.append(inherited)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, *_options(sys.orig_argv[1 : -len(arguments)]), *arguments]
    if os.name == "nt":  # where a replaced process returns to its shell at once
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)  # noqa: S603
    os.execve(sys.executable, command, environment)  # noqa: S606


if __name__ == "__main__":
    main()
