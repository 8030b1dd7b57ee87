"""Plots of recorded runs: loss, reward, tokens, time and all other numbers of each step, as PNG or HTML."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, Final

from tinker_sync._base.jsonl import read_lines
from tinker_sync.errors import ConfigurationError, InvalidInputError
from tinker_sync.insight.page import chart
from tinker_sync.loop.recorder import FILE_NAME

Line = Mapping[str, Any]
Curve = list[tuple[int, float]]

_COLOURS: Final = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
_STYLE: Final = """
:root { color-scheme: light dark; font: 14px system-ui, sans-serif; }
body { margin: 24px; display: grid; gap: 24px; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); }
header { grid-column: 1 / -1; } h2 { font-size: 15px; margin: 0 0 6px; } figure { margin: 0; }
.key { margin-right: 16px; white-space: nowrap; }
"""


def _number(line: Line, *names: str) -> float | None:
    for name in names:
        with suppress(OverflowError):  # a whole number that no float holds
            if isinstance(value := line.get(name), (int, float)) and math.isfinite(value):
                return float(value)
    return None


def _tokens(line: Line) -> float | None:
    tokens = line.get("tokens")
    counts = tokens.values() if isinstance(tokens, dict) else ()
    return sum(each for each in counts if type(each) in (int, float)) or None


PANELS: Final[Mapping[str, Callable[[Line], float | None]]] = {
    "loss": lambda line: _number(line, "loss:mean", "loss", "loss:sum"),
    "reward": lambda line: _number(line, "reward", "reward:mean", "reward/mean"),
    "tokens": _tokens,
    "seconds": lambda line: _number(line, "step_s"),
}
"""The first panels, each with the function that returns its value for a step."""

_SHOWN: Final = frozenset(
    {"step", "time", "tokens", "step_s", "call_s", "loss:mean", "loss", "loss:sum"}
    | {"reward", "reward:mean", "reward/mean"}
)
"""The values of the first panels, and those that are no curve."""


def _other_values(lines: Iterable[Line]) -> Iterator[str]:
    """Return the names of the other numbers of a run: the user's own ones, and the metrics of the server."""
    for name, value in chain.from_iterable(line.items() for line in lines):
        counts = type(value) in (int, float) and name not in _SHOWN
        # Values that identify something are numbers too.
        if counts and not name.partition(":")[2].startswith(("unique", "hash")):
            yield name


def read_run(directory: str | os.PathLike[str]) -> list[Line]:
    """Return the lines of a run in the order of its steps. If a step has several lines, the last one counts.

    Args:
        directory: the directory of the run, or the file with the lines.

    Raises:
        InvalidInputError: there is no recorded run, or a run without a step.

    >>> read_run("/no/such/run")
    Traceback (most recent call last):
    tinker_sync.errors.InvalidInputError: /no/such/run: there is no metrics.jsonl; service.recorder writes one
    """
    path = Path(directory)
    path = path / FILE_NAME if path.is_dir() or not path.exists() else path
    if not path.exists():
        raise InvalidInputError(f"{directory}: there is no {FILE_NAME}; service.recorder writes one")
    found: dict[int, Line] = {}
    for _, line in read_lines(path):
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found[line["step"]] = line
    if not found:
        raise InvalidInputError(f"{path}: it has no step yet")
    return [found[step] for step in sorted(found)]


def draw(runs: Sequence[str | os.PathLike[str]], to: str | os.PathLike[str] | None = None) -> Path:
    """Draw runs into one picture, and return its path.

    Args:
        runs: the directories of the runs.
        to: a `.png` file, which needs matplotlib, or an `.html` file. None writes `plot.png` into the first
            directory, or `plot.html` if matplotlib is not installed.

    Raises:
        InvalidInputError: `runs` is empty, a run has no steps, or `to` has another extension.
        ConfigurationError: a PNG is requested and matplotlib is not installed.
    """
    if not runs:
        raise InvalidInputError("runs: it is empty; name the directory of at least one run")
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if to is None:
        first = Path(runs[0])
        folder = first if first.is_dir() else first.parent
        to = folder / ("plot.png" if has_matplotlib else "plot.html")
    path = Path(to)
    named = {_name(run, runs): read_run(run) for run in runs}
    others = dict.fromkeys(chain.from_iterable(map(_other_values, named.values())))
    shown = {}
    panels: dict[str, Callable[[Line], float | None]] = dict(PANELS)
    panels.update((name, partial(_value, name)) for name in others)
    for title, pick in panels.items():
        curves = {name: _curve(lines, pick) for name, lines in named.items()}
        if any(curves.values()):
            shown[title] = curves
    if path.suffix == ".html":
        path.write_text(page(shown), encoding="utf-8")
    elif path.suffix != ".png":
        raise InvalidInputError(f"{path}: expected a name that ends with .png or .html")
    elif not has_matplotlib:
        raise ConfigurationError("matplotlib is not installed: pip install matplotlib, or name an .html file")
    else:
        _draw_png(shown, path)
    return path


def _name(run: str | os.PathLike[str], runs: Sequence[str | os.PathLike[str]]) -> str:
    names = [Path(each).resolve().name for each in runs]
    own = Path(run).resolve().name
    return own if names.count(own) == 1 else os.fspath(run)


def _value(name: str, line: Line) -> float | None:
    return _number(line, name)


def _curve(lines: Sequence[Line], pick: Callable[[Line], float | None]) -> Curve:
    return [(line["step"], value) for line in lines if (value := pick(line)) is not None]


# ------------------------------------------------------------------------------------------------- HTML


def page(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """Return a self-contained HTML page with a figure for each panel, in light or dark colours.

    >>> "polyline" in page({"loss": {"x": [(0, 2.0), (1, 1.0)]}})
    True
    """
    names = list(dict.fromkeys(chain.from_iterable(panels.values())))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    keys = "".join(_key(name, colours[name]) for name in names)
    figures = "".join(_figure(title, curves, colours) for title, curves in panels.items())
    title = escape(", ".join(names))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><header>{keys}</header>{figures}</html>\n"
    )


def _key(name: str, colour: str) -> str:
    return f'<span class="key"><b style="color:{colour}">&#9644;</b> {escape(name)}</span>'


def _figure(title: str, curves: Mapping[str, Curve], colours: Mapping[str, str]) -> str:
    return f"<figure><h2>{escape(title)}</h2>{chart(curves, colours, title)}</figure>"


# -------------------------------------------------------------------------------------------------- PNG


def _draw_png(panels: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    figure: Any = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 3.2 * ((len(panels) + 1) // 2)), layout="constrained"
    )
    axes = figure.subplots((len(panels) + 1) // 2, 2, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        for name, curve in curves.items():
            steps, values = [step for step, _ in curve], [value for _, value in curve]
            axis.plot(steps, values, label=name, marker="o" if len(curve) == 1 else None)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
