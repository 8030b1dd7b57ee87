"""`as_completed` and `gather`, and their progress bars."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tinker_sync import APIFuture, InvalidInputError, as_completed, gather


def ended(outcome: Any) -> APIFuture[Any]:
    future: APIFuture[Any] = APIFuture()
    if isinstance(outcome, Exception):
        future.fail(outcome)
    else:
        future.resolve(outcome)
    return future


def test_futures_come_as_they_end() -> None:
    late, early = APIFuture[str](), ended("early")
    found = as_completed([late, early])
    assert next(found) is early
    late.resolve("late")
    assert [future.result() for future in found] == ["late"]


def test_results_are_in_the_order_of_the_futures() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert gather([ended("a"), pool.submit(str, 7), ended(None)]) == ["a", "7", None]
    assert gather([]) == []
    assert gather(ended(n) for n in range(3)) == [0, 1, 2]
    same = ended("twice")
    assert gather([same, same]) == ["twice", "twice"]


def test_the_first_failure_is_raised_while_others_go_on() -> None:
    waits: APIFuture[str] = APIFuture()
    with pytest.raises(KeyError):
        gather([waits, ended(KeyError("a"))])
    assert not waits.done()


def test_failures_as_values() -> None:
    cancelled: APIFuture[str] = APIFuture()
    cancelled.cancel()
    got = gather([ended(KeyError("a")), ended("b"), cancelled], return_exceptions=True)
    assert [type(value).__name__ for value in got] == ["KeyError", "str", "CancelledError"]


def test_time_runs_out_and_the_work_goes_on() -> None:
    waits: APIFuture[str] = APIFuture()
    with pytest.raises(TimeoutError, match=r"1 \(of 2\) futures unfinished; their work goes on"):
        gather([waits, ended(1)], timeout=0)
    assert not waits.cancelled()


@pytest.mark.parametrize(
    ("futures", "complaint"),
    [
        (Future[int](), r"gather: expected a list of futures, got one; write gather\(\[future\]\)"),
        ([7], r"gather: futures\[0\] is of class int, expected a future$"),
    ],
)
def test_what_is_no_list_of_futures_is_refused(futures: Any, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        gather(futures)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_calls_of_its_parent() -> None:
    code = (
        "import os, signal\n"
        "from tinker_sync import APIFuture, TinkerError, as_completed, gather\n"
        "begun, done = APIFuture(), APIFuture()\n"
        "done.resolve(7)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.alarm(60)  # ends a child that waits for ever\n"
        "    refused = []\n"
        "    for wait in (lambda: list(as_completed([done, begun])), lambda: gather([done, begun])):\n"
        "        try:\n"
        "            wait()\n"
        "        except TinkerError as error:\n"
        "            refused.append('in the parent only' in str(error))\n"
        "    os._exit(0 if refused == [True] * 2 and gather([done]) == [7] else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


pytest.importorskip("tqdm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error with a terminal, and return it.

    A test must call this itself, because pytest replaces standard error again after fixtures have run.
    """
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def done(outcome: Any) -> APIFuture[Any]:
    future: APIFuture[Any] = APIFuture()
    future.fail(outcome) if isinstance(outcome, Exception) else future.resolve(outcome)
    return future


def drawn(monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Gather one result at a terminal, and return what is drawn there."""
    terminal = a_terminal(monkeypatch)
    gather([done(1)], **options)
    return terminal.getvalue()


def test_a_bar_counts_and_names_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    gather([done(1), done(KeyError("a")), done(2)], return_exceptions=True, progress=True)
    last = terminal.getvalue().rsplit("\r", 1)[-1]
    assert "3/3" in last
    assert "failed=1" in last


def test_the_switch_of_tqdm_turns_its_bars_off() -> None:
    """Such a bar has no counts, and tqdm reads its variables once, when it is loaded."""
    code = (
        "import io, sys\n"
        "from tinker_sync.batch.waiting import ProgressBar\n"
        "sys.stderr = io.StringIO()\n"
        "sys.stderr.isatty = lambda: True\n"
        "bar = ProgressBar(True, 3, 'samples')\n"
        "bar.skip(), bar.advance(failed=True), bar.close()\n"
        "print(repr(sys.stderr.getvalue()))\n"
    )
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    made = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (made.stdout.strip(), made.stderr) == ("''", "")


@pytest.mark.parametrize("word", ["0", "false", "no", "OFF"])
def test_one_switch_turns_every_bar_off(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_PROGRESS", word)
    assert drawn(monkeypatch, progress=True) == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_there_is_no_bar_without_a_terminal(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    gather([done(1)], progress=True)
    assert stream is None or stream.getvalue() == ""


def test_there_is_no_bar_without_tqdm_or_unasked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch) == ""
    assert drawn(monkeypatch, progress=True)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert drawn(monkeypatch, progress=True) == ""
