"""What is shown: to people with progress, into pipes without."""

from __future__ import annotations

import io
import sys

import pytest

from tinker_sync.demo.screen import Screen


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class Pipe(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]


def two_steps(out: io.StringIO) -> str:
    with Screen(out).progress("training", 2) as advance:
        advance("loss 2.0")
        advance("loss 1.0")
    return out.getvalue()


def test_progress_is_not_written_into_a_pipe() -> None:
    assert two_steps(Pipe()) == ""


def test_progress_without_rich_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    text = two_steps(Terminal())
    assert text.count("\r") == 2
    assert text.rstrip(" ").endswith("\n")
    assert "training [############............] 1/2 loss 2.0" in text
    assert "training [########################] 2/2 loss 1.0" in text


def test_progress_with_rich() -> None:
    pytest.importorskip("rich")
    text = two_steps(Terminal())
    assert "training" in text
    assert "2/2" in text
    assert "loss 1.0" in text


def test_cells_stand_side_by_side_and_are_folded() -> None:
    out = Pipe()
    Screen(out).table(("asked", "before", "after"), [("x", "word " * 20, "short")], first=8)
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["asked", "before", "after"]
    body = lines[3:]
    assert len(body) == 2
    assert body[0].startswith("x         word word")
    assert body[0].endswith("  short")
    assert max(map(len, lines)) <= 110
    assert lines[1].index("after") == body[0].index("short")


def test_a_stream_without_blocks_gets_ascii() -> None:
    out = Pipe()
    screen = Screen(out)
    screen.curve("loss", [2.0, 1.0])
    screen.say("a … b")
    assert out.getvalue().isascii()
    assert "a ? b" in out.getvalue()
