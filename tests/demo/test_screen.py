"""Progress on terminals and in pipes, tables, and curves drawn with characters."""

from __future__ import annotations

import io
import sys

import pytest

from tinker_sync.demo.screen import Screen, average_columns, can_encode_blocks, plot


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


def test_no_progress_in_a_pipe() -> None:
    assert two_steps(Pipe()) == ""


def test_progress_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_table_folds_cells() -> None:
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


def test_prose_and_headings_fold_between_words_and_paths_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out, path = Terminal(), f"tinker://{'x' * 70}/weights/sorting"
    screen = Screen(out)
    screen.paragraph(f"saved after step 40: {path}")
    screen.paragraph("word " * 30)
    screen.heading("two words " * 10)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["saved after step 40:", path]
    assert [len(line) <= 80 for line in lines].count(False) == 1
    assert lines[-1] == "-" * max(map(len, lines[-3:-1]))
    assert all(line.split()[-1] in ("word", "two", "words") for line in lines[2:-1] if line)


def test_a_stream_without_blocks_gets_ascii() -> None:
    out = Pipe()
    screen = Screen(out)
    screen.curve("loss", [2.0, 1.0])
    screen.write("a … b")
    assert out.getvalue().isascii()
    assert "a ? b" in out.getvalue()


def test_plot_with_blocks() -> None:
    assert plot([0.0, 1.0, 2.0], rows=2) == ["   2.00 ┤  █", "        │ ██", "   0.00 └───", "         1 … 3"]


def test_plot_without_blocks_is_ascii() -> None:
    lines = plot([0.0, 1.0, 2.0], rows=2, blocks=False)
    assert "\n".join(lines).isascii()
    assert lines[0] == "   2.00 |  #"


def test_a_long_curve_is_averaged() -> None:
    lines = plot([float(number) for number in range(1000)], width=50)
    assert {len(line) for line in lines[:-2]} == {59}
    assert lines[-1].endswith("1 … 1000")
    assert average_columns([1.0, 2.0, 3.0, 4.0, 5.0], 2) == [1.5, 4.0]
    assert average_columns([1.0, 2.0], 10) == [1.0, 2.0]


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [float("nan"), 1.0], [-1.0, 1.0]])
def test_plot_of_special_values(values: list[float]) -> None:
    lines = plot(values, rows=3)
    assert len(lines) == 5


def test_a_negative_minimum_is_the_floor() -> None:
    lines = plot([-2.0, 2.0], rows=1)
    assert lines == ["   2.00 ┤ █", "  -2.00 └──", "         1 … 2"]


@pytest.mark.parametrize(("encoding", "can"), [("utf-8", True), ("cp1252", False), ("no-such", False)])
def test_can_encode_blocks(encoding: str, can: bool) -> None:
    assert can_encode_blocks(encoding) is can
