"""After kill -9 at any moment, exactly the acknowledged checkpoints exist, bit for bit.

The environment variable `KILL_ROUNDS` sets the number of kills.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clock import PATIENCE_S
from support.hasty_writer import THREADS, content
from support.stores import same

import tinker_sync
from tinker_sync.local.store import Store

ROUNDS = int(os.environ.get("KILL_ROUNDS", "3"))
ROOT = Path(tinker_sync.__file__).parents[1]
# The number of the save that each checkpoint holds, by run and name; None for a missing checkpoint.
State = dict[tuple[str, str], int | None]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no kill -9")


class Ledger:
    """The states of the checkpoints that are possible after the output of a killed writer.

    An operation in progress may have been carried out or not.
    """

    def __init__(self, before: State) -> None:
        self.sure = dict(before)
        self.open: dict[int, tuple[str, tuple[str, str]]] = {}
        self.done = 0

    def read(self, line: str) -> None:
        word, *rest = line.split()
        if word == "try":
            number, action, run, name = rest
            self.open[int(number)] = (action, (run, name))
        elif word in ("done", "refused"):
            action, key = self.open.pop(int(rest[0]))
            if word == "done":
                self.sure[key] = None if action == "delete" else int(rest[0])
                self.done += 1

    def allowed(self, key: tuple[str, str]) -> set[int | None]:
        """Return the possible states of one checkpoint: the numbers of saves, and None for a missing one."""
        may = {self.sure.get(key)}
        for number, (action, other) in self.open.items():
            if other == key:
                may.add(None if action == "delete" else number)
        return may


@contextmanager
def killed_writer(directory: Path, seed: int, after: int) -> Iterator[list[str]]:
    """Start a writer, kill it shortly after `after` operations, and yield the lines of its output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.hasty_writer", str(directory), str(seed)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(PATIENCE_S * 4, process.kill)
    watchdog.start()
    lines: list[str] = []
    try:
        rng = random.Random(seed)
        done = 0
        for line in process.stdout:
            lines.append(line)
            done += line.startswith("done")
            if done == after:
                # A random point within its next operation; most take a few milliseconds.
                threading.Event().wait(rng.uniform(0, 0.01))
                os.kill(process.pid, signal.SIGKILL)
                break
        lines += process.stdout.readlines()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL, process.stderr.read()
        yield lines
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()  # type: ignore[union-attr]  # it is a pipe
        process.stderr.close()  # type: ignore[union-attr]  # it is a pipe


def found_in(directory: Path) -> State:
    """Open the directory like a new server, check that each checkpoint is whole, and return the state."""
    state: State = {}
    with Store(directory) as store:
        for number in range(THREADS):
            run = f"r-{number}"
            for found in store.list_checkpoints(run):
                name = found.checkpoint_id.removeprefix("weights/")
                info, arrays = store.load_checkpoint(run, "training", name)
                assert same(arrays, content(info["number"])), found  # type: ignore[arg-type]
                state[run, name] = info["number"]
        with store._database.read("the check could not run") as connection:
            assert [tuple(line) for line in connection.execute("PRAGMA integrity_check")] == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        # Folders and checkpoints match one to one.
        assert len(list((directory / "checkpoints").iterdir())) == len(state)
        assert list((directory / "staging").iterdir()) == []
    return state


def test_a_killed_writer_loses_no_acknowledged_checkpoint(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(20)
    state: State = {}
    acknowledged = in_flight = 0
    for seed in range(ROUNDS):
        with killed_writer(tmp_path, seed, rng.randint(1, 25)) as lines:
            ledger = Ledger(state)
            for line in lines:
                ledger.read(line)
        state = found_in(tmp_path)
        for key in {*state, *ledger.sure, *(key for _, key in ledger.open.values())}:
            assert state.get(key) in ledger.allowed(key), f"round {seed}: {key}"
        acknowledged += ledger.done
        in_flight += len(ledger.open)
    assert acknowledged >= ROUNDS
    assert in_flight >= ROUNDS  # else the kills hit no operation in progress
    record_testsuite_property("kills", ROUNDS)
    record_testsuite_property("acknowledged by the store", acknowledged)
    record_testsuite_property("in flight", in_flight)
