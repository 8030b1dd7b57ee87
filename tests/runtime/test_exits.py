"""What `test_life_exit.py` cannot bring about in a process that ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tinker_sync.runtime import exits
from tinker_sync.runtime.exits import finish_all, finish_at_exit


class Member:
    """A double of an open client, whose session the end of the process finishes.

    A `silent` one never gets an answer from its server.
    """

    def __init__(self, *, silent: bool = False, failure: BaseException | None = None) -> None:
        self.silent = silent
        self.failure = failure
        self.finished: list[tuple[str, str | None, float, bool]] = []

    def wait_for_changes(self, limit_s: float) -> None:
        self.waited_s = limit_s

    def finish(
        self, status: str, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> threading.Event | None:
        self.finished.append((status, detail, limit_s, quiet))
        if self.failure is not None:
            raise self.failure
        done = threading.Event()
        if not self.silent:
            done.set()
        return done


@pytest.fixture(autouse=True)
def nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_open", exits._Open())


def test_the_time_for_changes_is_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 45.0, 70.0])  # the members take 45 s and 25 s
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: next(moments, 70.0)))
    members = [Member() for _ in range(3)]
    for member in members:
        finish_at_exit(member)
    finish_all()
    assert sorted(member.waited_s for member in members) == [0.0, 15.0, 60.0]


@pytest.mark.parametrize("failure", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_nothing_is_raised_or_printed(failure: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    member = Member(failure=failure)
    finish_at_exit(member)
    finish_all()
    assert len(member.finished) == 1
    assert capfd.readouterr() == ("", "")
