"""Runs lines of the reference client's command line, one after the other, and prints how each ended.

It runs in its own process, because its connections live until the process ends. Standard input is JSON: a
list of pairs of a line and the text that is typed into the command.
"""

from __future__ import annotations

import json
import os
import sys

from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError


def main() -> None:
    ended = []
    for arguments, typed in json.load(sys.stdin):
        result = CliRunner().invoke(main_cli, arguments, input=typed)
        # Convert exceptions to exit codes as its entry point does.
        code = (
            result.exception.exit_code if isinstance(result.exception, TinkerCliError) else result.exit_code
        )
        problem = f"{result.exception}" if result.exception else ""
        ended.append({"code": code, "out": result.stdout, "problem": problem})
    print(json.dumps(ended), flush=True)  # noqa: T201  # to the process that started this one
    # Exit at once, because the threads of the reference client may crash at the end. No request is under way.
    os._exit(0)


if __name__ == "__main__":
    main()
