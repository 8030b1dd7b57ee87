"""Training goes on while its server is killed at any moment and started again at its port and directory.

The server kills itself at a function call, of Python or C, or some milliseconds after one. By default it dies
a few times; `SERVER_KILLS=300 pytest tests/local/process/test_kill_and_train.py` lets it die 300 times.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import pytest
from support.hasty import quick_service
from support.mortal_runs import PATIENCE_S, STEPS, batch, train
from support.mortal_server import KEY, MODEL, MortalServer

from tinker_sync import AdamParams, TinkerError, TrainingClient
from tinker_sync.local.store import Store

KILLS = int(os.environ.get("SERVER_KILLS", "4"))

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")

Run = Callable[[str, list[str]], str]
"""A function that trains at the server with this address, adds the paths of acknowledged checkpoints to the
list, and returns the path of the last one."""


def tries() -> Iterator[int]:
    """Yield the numbers of tries, up to a limit that training reaches only if it makes no progress.

    Raises:
        AssertionError: the limit is reached.
    """
    yield from range(100)
    raise AssertionError("training does not go on")


def train_and_resume(directory: Path) -> Run:
    """Return a `Run` that starts the training script again after each failure, from its last save on."""

    def run(url: str, acknowledged: list[str]) -> str:
        for _ in tries():
            with suppress(TinkerError):
                acknowledged.append(train(url, KEY, directory))
                break
        saves = (directory / "checkpoints.jsonl").read_text().splitlines()
        acknowledged += [json.loads(line)["saved"]["path"] for line in saves]
        return acknowledged[0]

    return run


def train_and_recover(url: str, acknowledged: list[str]) -> str:
    """Train as a `Run` with one service client, and recover from the last checkpoint after each failure."""
    with quick_service(base_url=url, api_key=KEY) as service:
        training: TrainingClient | None = None
        first = 0
        for _ in tries():
            try:
                training = training or service.create_lora_training_client(MODEL, rank=4, seed=1)
                for step in range(first, STEPS):
                    training.forward_backward(batch(step), "cross_entropy")
                    training.optim_step(AdamParams(learning_rate=1e-2))
                    if step % 2:
                        path = training.save_state(f"step-{step}").result(PATIENCE_S).path
                        acknowledged.append(path)
                        first = step + 1
                acknowledged.append(training.save_state("final").result(PATIENCE_S).path)
            except TinkerError:
                training = training.recover() if training is not None and first else None
            else:
                break
        return acknowledged[-1]


class Ground:
    """Training while the server is killed, compared with undisturbed training.

    The constructor trains once on a server that is not killed, and keeps the digests of the checkpoints.
    `survive` trains again while the server kills itself, and checks that the checkpoints are the same.

    Args:
        server: the server, which kills itself at a chosen function call.
        directory: the server's directory.
    """

    def __init__(self, server: MortalServer, directory: Path) -> None:
        self._server = server
        self._directory = directory
        self.deaths = 0
        self.checked = 0
        server.start(die_at=1 << 60)
        last = train_and_recover(server.url, [])
        self._calls = server.stop()
        self._right = {path.rpartition("/")[2]: digest for path, digest in self.digests().items()}
        assert self._right.keys() == {"step-1", "step-3", last.rpartition("/")[2]}

    def digests(self) -> dict[str, str]:
        """Load all checkpoints in the directory, and return a digest of the numbers in each, by its path."""
        found = {}
        with Store(self._directory) as store:
            rows, total = store.list_user_checkpoints(100_000, 0)
            assert len(rows) == total == len(list((self._directory / "checkpoints").iterdir()))
            for row in rows:
                run, _, checkpoint = row.tinker_path.removeprefix("tinker://").partition("/")
                name = checkpoint.partition("/")[2]
                _, arrays = store.load_checkpoint(run, row.checkpoint_type, name)
                parts = [name.encode() + array.tobytes() for name, array in sorted(arrays.items())]
                found[row.tinker_path] = hashlib.sha256(b"".join(parts)).hexdigest()
        with closing(sqlite3.connect(self._directory / "state.sqlite")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return found

    def survive(self, run: Run, chance: random.Random) -> None:
        """Run a `Run` while the server dies again and again, and then check all checkpoints."""
        acknowledged: list[str] = []
        over = threading.Event()
        self._start(chance)
        keeper = threading.Thread(target=self._start_again, args=(chance, over))
        keeper.start()
        try:
            run(self._server.url, acknowledged)
        finally:
            over.set()
            self._server.kill()
            keeper.join(PATIENCE_S)
        found = self.digests()
        assert set(acknowledged) <= found.keys()
        wrong = {path for path in found if found[path] != self._right[path.rpartition("/")[2]]}
        assert not wrong
        self.checked += len(acknowledged)

    def _start_again(self, chance: random.Random, over: threading.Event) -> None:
        while True:
            self._server.reap()
            if over.is_set():
                return
            self.deaths += 1
            self._start(chance)
            if over.is_set():
                self._server.kill()

    def _start(self, chance: random.Random) -> None:
        delay_seed = chance.choice([None, chance.randrange(1 << 30)])
        while not self._server.start(chance.randrange(self._calls), delay_seed):
            self._server.reap()
            self.deaths += 1


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with MortalServer(tmp_path / "data") as server:
        yield Ground(server, tmp_path / "data")


def test_a_killed_server_keeps_what_it_acknowledged_and_training_goes_on(
    ground: Ground, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    for seed in count():
        run = train_and_resume(tmp_path / f"run-{seed}") if seed % 2 else train_and_recover
        ground.survive(run, random.Random(seed))
        if ground.deaths >= KILLS:
            break
    assert ground.checked >= 3
    record_testsuite_property("kills", ground.deaths)
    record_testsuite_property("acknowledged", ground.checked)
    record_testsuite_property("runs", seed + 1)
