"""Progress bars: the streams on which they are drawn, and their counts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from tinker_sync import gather
from tinker_sync.batch.waiting import ProgressBar
from tinker_sync.runtime.futures import APIFuture

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


def test_what_was_done_before_does_not_count_for_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    bar = ProgressBar(True, 10, "samples")
    for _ in range(9):
        bar.skip()
    made = bar._bar.format_dict
    assert (made["n"], made["initial"], made["total"]) == (9, 9, 10)
    bar.advance()
    bar.close()
    assert "10/10" in terminal.getvalue()


def test_the_switch_of_tqdm_turns_bars_off() -> None:
    program = """if True:
        import io, sys
        sys.stderr = io.StringIO()
        sys.stderr.isatty = lambda: True
        from tinker_sync.batch.waiting import ProgressBar
        bar = ProgressBar(True, 3, "samples")
        bar.skip()
        bar.advance(failed=True)
        bar.close()
        print(repr(sys.stderr.getvalue()))
    """
    # The variable is read when tqdm is imported.
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    command = [sys.executable, "-c", program]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (made.stdout.strip(), made.stderr) == ("''", "")
