from __future__ import annotations

import threading
from itertools import chain

from support.clock import PATIENCE_S
from support.crowd import aside, together, until
from support.isolation import our_threads

from tinker_sync.runtime.workers import Workers


def test_nothing_is_lost_when_threads_come_and_go() -> None:
    """Every job is done, although threads start and end often, because an idle one ends at once."""
    for _ in range(20):
        pool = Workers("send", max_threads=4, idle_s=0)

        def use(offset: int, pool: Workers = pool) -> list[int]:
            futures = [pool.submit(lambda value: value, offset + number) for number in range(50)]
            return [future.result(PATIENCE_S) for future in futures]

        results = together(*[lambda offset=offset: use(offset) for offset in range(0, 400, 50)])
        assert sorted(chain.from_iterable(results)) == list(range(400))
        assert pool.close(PATIENCE_S)
        until(lambda: our_threads() == set())


def test_submitting_races_with_closing() -> None:
    """Each job that is submitted during a close is either refused or carried out."""
    for _ in range(50):
        pool, refused = Workers("send", max_threads=2), threading.Event()

        def submit(pool: Workers = pool, refused: threading.Event = refused) -> int:
            done = 0
            try:
                for _ in range(20):
                    done += pool.submit(lambda: 1).result(PATIENCE_S)
            except RuntimeError:
                refused.set()
            return done

        with aside(submit, submit) as counts:
            assert pool.close(PATIENCE_S)
        assert refused.is_set() == (sum(counts) < 40)
