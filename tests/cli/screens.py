"""A program that shows every screen of the command line, each after a line with its name.

`test_screens.py` runs it at a terminal, at the time of its stub server.
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
            assert bar._timer is not None
            bar._timer.join()  # the bar is visible after this
            bar.update(done)
            bar._bar.refresh()


if __name__ == "__main__":
    if sys.argv[1] == "bar":
        show_bar()
    else:
        show(json.loads(sys.argv[1]), sys.argv[2])
