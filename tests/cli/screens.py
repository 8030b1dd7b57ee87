"""A program that runs every command line of a table, each after a line with its name.

    python screens.py '{"name": ["run", "list"]}' NOW     run the lines; NOW stands for the present time
    python screens.py bar                                 show progress bars

`test_screens.py` runs it at a terminal, against a stub server.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime

from tinker_sync.cli import formatting, main
from tinker_sync.cli.output import Sink


def show(screens: dict[str, list[str]], now: str) -> None:
    formatting.utc_now = lambda: datetime.fromisoformat(now)
    for name, line in screens.items():
        sys.stdout.write(f"=== {name}\n")
        sys.stdout.flush()
        main(line)


def show_bar() -> None:
    for label, unit, done, total in (
        ("Deleting", "checkpoints", 1375, 2500),
        ("Fetching", "runs", 1375, None),
        ("Fetching run_weights_a", "bytes", 734_003_200, 2_147_483_648),
    ):
        with Sink(bar_after_s=0).progress(label, total, unit=unit) as bar:
            bar.update(done)
            bar._bar.refresh()


if __name__ == "__main__":
    if sys.argv[1] == "bar":
        show_bar()
    else:
        show(json.loads(sys.argv[1]), sys.argv[2])
