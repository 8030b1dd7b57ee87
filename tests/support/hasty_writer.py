"""A process that saves, overwrites and deletes checkpoints at full speed, and prints the acknowledged ones.

    python -m support.hasty_writer DIRECTORY SEED

It prints a line just before each call of the store, and a line when the store has returned:

    try N ACTION RUN NAME  the call of operation N begins
    done N, or refused N   the store has carried it out, or has raised an error
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
    """Return the arrays of save N. Any two saves differ, so a checkpoint mixed from two is noticed."""
    return with_optimizer(number, rows=6 + number % 7 * 400)


def work(store: Store, run: str, base: int, rng: random.Random) -> None:
    """Save, overwrite and delete checkpoints of one run, without end.

    Each thread has its own run, so it knows which checkpoints exist.
    """
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
    # Write a line with one system call, so that lines of several threads do not mix and a kill cuts none.
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
