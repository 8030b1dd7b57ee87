"""The work at the end of a process, tested without ending one."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tinker_sync.runtime import exits
from tinker_sync.runtime.exits import find_status, finish_all, finish_at_exit, forget, hang_up_at_exit


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
    monkeypatch.setattr(exits, "_open", exits._Registry(inherited=False))


def test_every_open_session_is_finished() -> None:
    members = [Member() for _ in range(3)]
    for member in members:
        finish_at_exit(member)
    forget(members[1])
    finish_all()
    assert [len(member.finished) for member in members] == [1, 0, 1]
    assert members[0].finished == [("success", None, exits.EXIT_LIMIT_S, True)]
    assert members[0].waited_s <= exits.PENDING_LIMIT_S


def test_the_time_for_changes_is_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 45.0, 70.0])  # the members take 45 s and 25 s
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: next(moments, 70.0)))
    members = [Member() for _ in range(3)]
    for member in members:
        finish_at_exit(member)
    finish_all()
    assert sorted(member.waited_s for member in members) == [0.0, 15.0, 60.0]


def test_the_limit_is_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "EXIT_LIMIT_S", 0.2)
    members = [Member(silent=True) for _ in range(200)]
    for member in members:
        finish_at_exit(member)
    began = time.monotonic()
    finish_all()
    assert time.monotonic() - began < 20  # one after the other, 200 times 0.2 s would take 40 s
    assert [len(member.finished) for member in members] == [1] * 200


@pytest.mark.parametrize("failure", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_nothing_is_raised_or_printed(failure: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    member = Member(failure=failure)
    finish_at_exit(member)
    finish_all()
    assert len(member.finished) == 1
    assert capfd.readouterr() == ("", "")


def test_the_limit_leaves_time_for_the_interpreter() -> None:
    assert exits.EXIT_LIMIT_S <= 1.0  # a process must end within two seconds


def test_a_collected_client_is_not_finished() -> None:
    finish_at_exit(Member())
    assert exits._open.all() == []


def test_connections_that_open_during_the_end_do_not_disturb_it(caplog: pytest.LogCaptureFixture) -> None:
    class Line:
        def forget_idle(self) -> None:
            pass

    caplog.set_level(logging.DEBUG, "tinker_sync.session")
    lines = [Line() for _ in range(5000)]
    opening = threading.Thread(target=lambda: [hang_up_at_exit(line) for line in lines])
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        opening.start()
        while opening.is_alive():
            finish_all()
    finally:
        sys.setswitchinterval(usual_s)
        opening.join()
    assert caplog.records == []


def test_a_child_finishes_nothing_of_its_parents() -> None:
    member = Member()
    finish_at_exit(member)
    exits._open.renew_after_fork()
    finish_all()
    assert member.finished == []


@pytest.mark.parametrize(
    ("last", "prompt", "ended"),
    [
        (None, False, "success"),
        (ValueError(), False, "errored"),
        (KeyboardInterrupt(), False, "interrupted"),
        (ValueError(), True, "success"),
    ],
)
def test_the_status_of_a_process_that_ended(
    monkeypatch: pytest.MonkeyPatch, last: BaseException | None, prompt: bool, ended: str
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    if last is not None:
        monkeypatch.setattr(sys, "last_value", last, raising=False)
    if prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert find_status() == ended
