"""A training that is killed at any moment and restarted ends with the same weights, bit for bit.

By default it is killed a few times; `KILLS=300 pytest tests/journal/test_record.py` kills it 300 times.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.engine_ledger import Ledger, engine_ledger
from support.journal_runs import MODEL, Zygote, train

from tinker_sync.testing import LocalServer

KILLS = int(os.environ.get("KILLS", "6"))
_DEATHS_A_RUN = 3


class Ground:
    """A server with its ledger, the process that forks training scripts, and the right final weights."""

    def __init__(self, server: LocalServer, zygote: Zygote, ledger: Ledger) -> None:
        self.server = server
        self.zygote = zygote
        self.ledger = ledger
        self.right = ledger.saved[train(server.url, server.key, None)]
        """The digest of the final checkpoint of a run that is not killed."""
        self._lengths: dict[bool, int] = {}

    def length(self, journal: Path, *, counted: bool) -> int:
        """Return the number of function calls of a script that is not killed."""
        if counted not in self._lengths:
            self._lengths[counted] = self.zygote.run(journal, counted=counted)["calls"]
        return self._lengths[counted]

    def weights_after(self, answer: dict[str, Any]) -> str:
        """Return the digest of the final checkpoint, whose path is in the answer about a run."""
        assert answer.get("path"), answer
        return self.ledger.saved[answer["path"]]


@pytest.fixture
def land() -> Iterator[Ground]:
    with (
        engine_ledger() as ledger,
        LocalServer(model=MODEL, fwdbwd_max_chunk_len=2, hold_s=1.0) as server,
        Zygote(server.url, server.key) as zygote,
    ):
        yield Ground(server, zygote, ledger)


def die(land: Ground, journal: Path, chance: random.Random, *, counted: bool, restarts: bool) -> list[Any]:
    """Run the script a few times and kill it each time; then let it end. Return the answer to each order."""
    whole = land.length(journal.with_suffix(".undisturbed"), counted=counted)
    answers = []
    for _ in range(_DEATHS_A_RUN):
        moment = chance.randrange(whole)
        answers.append(land.zygote.run(journal, die_at=moment, counted=counted))
        if answers[-1].get("path"):  # the run ended before it was killed, so the next one would begin again
            return answers
        if restarts and chance.random() < 0.5:
            land.server.restart()
    return [*answers, land.zygote.run(journal, counted=counted)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_any_moment(
    land: Ground, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    deaths = 0
    for number in count():
        chance = random.Random(number)
        counted, restarts = number % 4 != 1, number % 3 == 1
        journal = tmp_path / f"{number}.journal"
        answers = die(land, journal, chance, counted=counted, restarts=restarts)
        deaths += sum("killed" in answer for answer in answers)
        assert land.weights_after(answers[-1]) == land.right, f"number {number}: {answers}"
        if deaths >= KILLS:
            break
    record_testsuite_property("kills", deaths)
    record_testsuite_property("runs", number + 1)
