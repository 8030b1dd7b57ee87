"""kill -9 of the server, at random moments, while clients train and save over HTTP.

`KILL_ROUNDS` sets the number of rounds; the default is one. All rounds use one directory, so the server of a
round finds what the round before left.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from support.clock import PATIENCE_S
from support.served import served

from tinker_sync import AdamParams, Datum, ModelInput, ServiceClient, TinkerError, TrainingClient
from tinker_sync.clients.rest import RestClient
from tinker_sync.local.store import Store

ROUNDS = int(os.environ.get("KILL_ROUNDS", "1"))
CLIENTS = 3
TINY = "tinker-sync/tiny"
DATUM = Datum(
    model_input=ModelInput.from_ints(list(range(20, 32))),
    loss_fn_inputs={"target_tokens": list(range(21, 33))},
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no kill -9")


class Acknowledged:
    """The checkpoints that the server has acknowledged, in mappings by their paths. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.digests: dict[str, str | None] = {}  # guarded by _lock; None: deleted
        self.losses: dict[str, float] = {}  # guarded by _lock; the loss with these weights
        self.open: set[str] = set()  # guarded by _lock; requests without a reply
        self.kept = 0  # guarded by _lock
        self.in_flight = 0
        self.under_way = threading.Event()

    def begin(self, path: str) -> None:
        with self._lock:
            self.open.add(path)
            self.under_way.set()

    def keep(self, path: str, digest: str | None, loss: float | None) -> None:
        with self._lock:
            self.open.discard(path)
            self.digests[path] = digest
            self.kept += 1
            self.losses.pop(path, None)
            if loss is not None:
                self.losses[path] = loss

    def settle(self, found: dict[str, str]) -> None:
        """Take the checkpoints of unanswered requests as they are on disk.

        The server was killed before it answered, so it may or may not have carried out these requests.

        Args:
            found: the digests of the checkpoints on disk, by path.
        """
        self.in_flight += len(self.open)
        for path in self.open:
            self.losses.pop(path, None)
            self.digests[path] = found.get(path)
        self.open.clear()


def digests_on_disk(directory: Path) -> dict[str, str]:
    """Return the digests of all training checkpoints in a directory, by path.

    This includes folders that the store does not list.
    """
    found = {}
    for folder in (directory / "checkpoints").iterdir():
        try:
            about = json.loads((folder / "checkpoint.json").read_bytes())
            content = [path.read_bytes() for path in sorted(folder.iterdir())]
        except FileNotFoundError:  # a sampler's folder, or one that was just deleted
            continue
        found[f"tinker://{about['run']}/weights/{about['name']}"] = hashlib.sha256(
            b"".join(content)
        ).hexdigest()
    return found


def train_and_save(
    service: ServiceClient, directory: Path, acknowledged: Acknowledged, seed: int, over: threading.Event
) -> None:
    """Train one model, and save and delete checkpoints, until the server is killed.

    Requests and their acknowledgements are recorded in `acknowledged`. `over` is set before the kill; an
    error before that is raised.
    """
    rng, rest = random.Random(seed), RestClient(service.holder)
    try:
        client = service.create_lora_training_client(TINY, rank=2, seed=seed).result()
        run = client.model_id
        for _ in count():
            client.forward_backward([DATUM], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=1e-2))
            loss = loss_of(client)
            path = f"tinker://{run}/weights/n{rng.randrange(3)}"
            action = rng.choice(["save", "save", "sampler", "delete"])
            if action == "save":
                acknowledged.begin(path)
                client.save_state(path.rpartition("/")[2], overwrite=True).result(PATIENCE_S)
                acknowledged.keep(path, digests_on_disk(directory)[path], loss)
            elif action == "sampler":
                name = f"s{rng.randrange(2)}"  # often the name of a checkpoint that exists, and is replaced
                path = f"tinker://{run}/sampler_weights/{name}"
                acknowledged.begin(path)
                client.save_weights_for_sampler(name).result(PATIENCE_S)
                acknowledged.keep(path, "sampler", None)
            elif acknowledged.digests.get(path) is not None:
                acknowledged.begin(path)
                rest.delete_checkpoint_from_tinker_path(path).result(PATIENCE_S)
                acknowledged.keep(path, None, None)
    except (TinkerError, TimeoutError):
        if not over.is_set():
            raise


def loss_of(client: TrainingClient) -> float:
    return client.forward([DATUM], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]


def load_all(directory: Path) -> dict[str, str]:
    """Load every checkpoint that the store lists, and return the digest of each, by path.

    The digest of a checkpoint for sampling is "sampler". Check also that nothing else is on disk.
    """
    found = {}
    with Store(directory) as store:
        on_disk = digests_on_disk(directory)  # after opening, which removed incomplete folders
        rows, total = store.list_user_checkpoints(100_000, 0)
        assert len(rows) == total
        for row in rows:
            store.load_checkpoint(row.run_id, row.kind, row.name)
            found[row.tinker_path] = on_disk[row.tinker_path] if row.kind == "training" else "sampler"
        with store._database.read("the check could not run") as connection:
            assert [tuple(line) for line in connection.execute("PRAGMA integrity_check")] == [("ok",)]
        assert len(list((directory / "checkpoints").iterdir())) == total
        assert list((directory / "staging").iterdir()) == []
    return found


def check_resumed_loss(service: ServiceClient, acknowledged: Acknowledged, rng: random.Random) -> None:
    """Check that a model made of a random saved checkpoint has the loss that was measured before the save."""
    if acknowledged.losses:
        path = rng.choice(sorted(acknowledged.losses))
        client = service.create_training_client_from_state_with_optimizer(path).result()
        assert loss_of(client) == acknowledged.losses[path]


def one_round(directory: Path, acknowledged: Acknowledged, seed: int) -> None:
    rng, over = random.Random(seed), threading.Event()
    before = acknowledged.kept
    with served("--data-dir", directory) as (process, url), ThreadPoolExecutor(CLIENTS) as pool:
        services = [ServiceClient(base_url=url, max_retries=0, pace=0.001) for _ in range(CLIENTS)]
        try:
            check_resumed_loss(services[0], acknowledged, rng)
            workers = [
                pool.submit(train_and_save, service, directory, acknowledged, seed * CLIENTS + number, over)
                for number, service in enumerate(services)
            ]
            after = rng.randint(1, 12)
            while acknowledged.kept - before < after and all(not worker.done() for worker in workers):
                acknowledged.under_way.clear()
                assert acknowledged.under_way.wait(PATIENCE_S)
            # A random moment within the next operation.
            threading.Event().wait(rng.uniform(0, 0.03))
            over.set()
            process.kill()
            process.wait(PATIENCE_S)
        finally:
            over.set()
            for service in services:
                service.close("interrupted", timeout=0.1).result(PATIENCE_S)
        for worker in workers:
            worker.result(PATIENCE_S)
    found = load_all(directory)
    for path in {*acknowledged.digests, *found} - acknowledged.open:
        assert found.get(path) == acknowledged.digests.get(path), f"round {seed}: {path}"
    acknowledged.settle(found)


def test_a_killed_server_keeps_acknowledged_checkpoints(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    acknowledged = Acknowledged()
    for seed in range(ROUNDS):
        one_round(tmp_path / "data", acknowledged, seed)
    assert acknowledged.kept >= ROUNDS
    if ROUNDS >= 10:
        assert acknowledged.in_flight > 0  # the kills have hit requests under way
    record_testsuite_property("kills", ROUNDS)
    record_testsuite_property("acknowledged over HTTP", acknowledged.kept)
    record_testsuite_property("in flight", acknowledged.in_flight)
