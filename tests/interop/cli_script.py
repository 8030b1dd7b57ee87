"""Runs lines of the reference client's command line, one after the other, and prints how each ended.

In a process of its own: its connections live as long as that. Standard input is JSON: a list of lines, each
with what is typed into it.
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
        # What its own entry point does with them.
        code = (
            result.exception.exit_code if isinstance(result.exception, TinkerCliError) else result.exit_code
        )
        problem = f"{result.exception}" if result.exception else ""
        ended.append({"code": code, "out": result.stdout, "problem": problem})
    print(json.dumps(ended), flush=True)  # noqa: T201  # to the process that started this one
    # The other client's threads may take the process down on its way out; nothing is under way any more.
    os._exit(0)


if __name__ == "__main__":
    main()
