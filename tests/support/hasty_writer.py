"""A process that saves, overwrites and deletes checkpoints at full speed, and prints what was acknowledged.

    python -m support.hasty_writer DIRECTORY SEED

Every line on its standard output is written after the store has returned, or just before it is asked:

    try N ACTION RUN NAME  about to
    done N, or refused N   the store has answered
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from support.stores import add_run, with_optimizer

from tinker_sync.local.store import Store, StoreError

NAMES = [f"n{number}" for number in range(6)]
THREADS = 3


def content(number: int) -> dict[str, object]:
    """Return the content of save N. Sizes change, and a mixture of two saves is detectable."""
    return with_optimizer(number, rows=6 + number % 7 * 400)


def work(store: Store, run: str, base: int, rng: random.Random) -> None:
    """Each thread has a run of its own, so that it knows what it may expect of its names."""
    for number in range(base, base + 1_000_000):
        name = rng.choice(NAMES)
        action = rng.choice(["save", "save", "delete", "overwrite"])
        say(f"try {number} {action} {run} {name}")
        try:
            if action == "delete":
                store.delete_checkpoint(run, "training", name)
            else:
                store.save_checkpoint(
                    run,
                    "training",
                    name,
                    content(number),  # type: ignore[arg-type]
                    {"number": number},
                    overwrite=action == "overwrite",
                )
        except StoreError as refused:
            if refused.kind not in ("exists", "not_found"):
                raise
            say(f"refused {number}")
        else:
            say(f"done {number}")


def say(line: str) -> None:
    # One call, so that lines of several threads do not mix and a kill does not cut one.
    os.write(1, f"{line}\n".encode())


def main() -> None:
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    store = Store(directory)
    if store.list_sessions(1, 0)[1] == 0:
        store.add_session("s-1")
        for number in range(THREADS):
            add_run(store, f"r-{number}")
    say("ready")
    threads = [
        threading.Thread(
            target=work,
            args=(store, f"r-{number}", (seed * THREADS + number) * 1_000_000, random.Random(seed + number)),
        )
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
