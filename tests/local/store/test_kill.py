"""kill -9 at any moment: exactly what was acknowledged is there afterwards, bit for bit.

`KILL_ROUNDS=100` for the whole proof; a few rounds by default.
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
# Name of a run and of a checkpoint; the number of the save that it holds, or None where there is none.
State = dict[tuple[str, str], int | None]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no kill -9")


class Ledger:
    """What a writer has said: what must be there, and for what was under way what may be there instead."""

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
        """What may be found. Each thread has its own names, so one thing at most is under way for each."""
        may = {self.sure.get(key)}
        for number, (action, other) in self.open.items():
            if other == key:
                may.add(None if action == "delete" else number)
        return may


@contextmanager
def killed_writer(directory: Path, seed: int, after: int) -> Iterator[list[str]]:
    """What a writer said until it was killed, a moment after it had done `after` things."""
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
        assert process.stdout is not None
        assert process.stderr is not None
        rng = random.Random(seed)
        done = 0
        for line in process.stdout:
            lines.append(line)
            done += line.startswith("done")
            if done == after:
                # Somewhere within what it does next, most of which takes a few milliseconds.
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
    """What a new server finds; every checkpoint is loaded and compared with what was saved."""
    state: State = {}
    with Store(directory) as store:
        for number in range(THREADS):
            for row in store.list_checkpoints(f"r-{number}"):
                info, arrays = store.load_checkpoint(row.run_id, row.kind, row.name)
                assert same(arrays, content(info["number"])), row  # type: ignore[arg-type]
                state[row.run_id, row.name] = info["number"]
        with store._database.read("the check could not run") as connection:
            assert [tuple(line) for line in connection.execute("PRAGMA integrity_check")] == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        # No folder without a checkpoint, and none with two.
        assert len(list((directory / "checkpoints").iterdir())) == len(state)
        assert list((directory / "staging").iterdir()) == []
    return state


def test_a_killed_writer_loses_nothing_it_has_acknowledged(
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
    assert in_flight >= ROUNDS  # or the kills came at quiet moments, and this showed nothing
    record_testsuite_property("kills", ROUNDS)
    record_testsuite_property("acknowledged by the store", acknowledged)
    record_testsuite_property("in flight", in_flight)
