"""A loop with checkpoints, killed at any moment and started again, ends with the same weights, bit for bit.

By default it is killed a few times; `KILLS=300 pytest tests/loop/test_deaths.py` kills it 300 times.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from support.engine_ledger import engine_ledger
from support.mortal_runs import MODEL, Zygote, train

from tinker_sync.testing import LocalServer

KILLS = int(os.environ.get("KILLS", "6"))
_DEATHS_A_RUN = 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_loop_that_is_killed_at_any_moment_resumes(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    deaths = 0
    with (
        engine_ledger() as ledger,
        LocalServer(model=MODEL, fwdbwd_max_chunk_len=2, hold_s=1.0) as server,
        Zygote(server.url, server.key) as zygote,
    ):
        right = ledger.saved[train(server.url, server.key, tmp_path / "undisturbed")]
        whole = zygote.run(tmp_path / "counted")["calls"]
        for number in count():
            chance, directory = random.Random(number), tmp_path / f"run-{number}"
            for _ in range(_DEATHS_A_RUN):
                deaths += "killed" in zygote.run(directory, die_at=chance.randrange(whole))
                if number % 3 == 1 and chance.random() < 0.5:
                    server.restart()
            answer = zygote.run(directory)
            assert answer.get("path"), answer
            assert ledger.saved[answer["path"]] == right, f"number {number}"
            if deaths >= KILLS:
                break
    record_testsuite_property("kills", deaths)
    record_testsuite_property("runs", number + 1)
