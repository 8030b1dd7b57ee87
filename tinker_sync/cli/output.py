"""`Sink`: the output of commands. Data goes to stdout as a table, JSON or JSON lines; messages go to stderr.

Only terminals get colour, tables that fit their width, and progress bars. NO_COLOR turns colour off there,
too. A `Sink` belongs to one thread.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeVar

from tinker_sync._base.clock import slice_of
from tinker_sync.cli.failures import CliError
from tinker_sync.cli.formatting import format_size, note_hidden

if TYPE_CHECKING:
    from rich.console import Console

    from tinker_sync.cli.table import Table

Format = Literal["table", "json", "jsonl"]
FORMATS: Final = ("table", "json", "jsonl")
# Work that ends sooner needs no bar.
BAR_AFTER_S: Final = 1.0

T = TypeVar("T")


class Sink:
    """The output of a command: its results and messages. Not thread-safe, except for the bars of `progress`.

    Args:
        form: the format of results.
        quiet: print data, questions and errors, but no messages, no warnings and no bars.
        bar_after_s: the delay before a bar shows.
    """

    def __init__(self, form: Format = "table", *, quiet: bool = False, bar_after_s: float = BAR_AFTER_S):
        self.form = form
        self.quiet = quiet
        if quiet:
            silence_warnings()
        self._bar_after_s = bar_after_s

    @property
    def for_people(self) -> bool:
        """True if data is printed as tables."""
        return self.form == "table"

    # -------------------------------------------------------------------------------------- data

    def show(self, data: Mapping[str, Any], table: Table, *, items: str | None = None) -> None:
        """Print a result in the format of this sink.

        Args:
            data: the result for JSON; values without a JSON form become text.
            table: the result for people.
            items: the key of the list in `data` whose entries become JSON lines; None: one line for all.
        """
        if self.form == "table":
            self._print_table(table)
        else:
            self.show_data(data, items=items)

    def show_data(self, data: Mapping[str, Any], *, items: str | None = None) -> None:
        """Print a result as JSON or JSON lines. The arguments are those of `show`."""
        if self.form == "jsonl":
            for item in [data] if items is None else data[items]:
                self.item(item)
        else:
            self._write(json.dumps(data, indent=2, default=str))

    def item(self, item: Any) -> None:
        """Print one JSON line and flush it."""
        self._write(json.dumps(item, default=str))

    def text(self, text: str = "", style: str = "") -> None:
        """Print a styled line for people and flush it."""
        from rich.text import Text

        _make_console(sys.stdout).print(Text(text, style), soft_wrap=True)
        sys.stdout.flush()

    def raw(self, text: str) -> None:
        """Print a line unchanged and flush it."""
        self._write(text)

    def _write(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def _print_table(self, table: Table) -> None:
        from tinker_sync.cli.table import lay_out

        console = _make_console(sys.stdout)
        for line in lay_out(table, console.width if console.is_terminal else None):
            console.print(line, soft_wrap=True)

    def show_list(
        self,
        entries: Iterable[T],
        name: str,
        table: Callable[[list[T], str], Table],
        *,
        limit: int = 0,
        more: Mapping[str, Any] | None = None,
        data: Callable[[T], Mapping[str, Any]] | None = None,
    ) -> None:
        """Print a list: each entry as a JSON line when it arrives, or all as a table or JSON after the last.

        Args:
            entries: values of the API, or values that `data` converts; iteration may fetch them.
            name: the name of the list in JSON, such as "runs".
            table: makes a table from all entries and a note on the number of entries that are not shown.
            limit: the most entries that `entries` yields, for the progress bar; 0: no limit.
            more: fields before the list in JSON.
            data: turns an entry into JSON data; None: `dump`.
        """
        convert = data or dump
        if self.form == "jsonl":
            for entry in entries:
                self.item(convert(entry))
            return
        found: list[T] = []
        with self.progress(f"Fetching {name}", limit or None, unit=name) as bar:
            for entry in entries:
                found.append(entry)
                total = getattr(entries, "total", None)
                bar.update(len(found), min(limit or total, total) if total else None)
        total = getattr(entries, "total", None)
        tree = {**(more or {}), name: [convert(entry) for entry in found]}
        self.show(tree, table(found, note_hidden(total or 0, len(found))))

    # -------------------------------------------------------------------------------------- messages

    def say(self, text: str) -> None:
        """Print a message on stderr, unless `quiet` is set."""
        if not self.quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        """Print a message on stderr, also if `quiet` is set: about a failure, or before a question."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def confirm(self, question: str) -> bool:
        """Ask a question on stderr and return True for "y" or "yes".

        Raises:
            CliError: stdin ends before an answer.
        """
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        answer = _read_line()
        if not answer:
            sys.stderr.write("\n")
            raise CliError("the question got no answer", "Give --yes to go ahead without being asked.")
        return answer.strip().lower() in ("y", "yes")

    # -------------------------------------------------------------------------------------- progress

    @contextmanager
    def progress(self, label: str, total: int | None = None, *, unit: str = "") -> Iterator[Progress]:
        """Yield a `Progress`, and show its bar on stderr while the block runs.

        The bar appears only on a terminal, for results as tables, without `quiet`, and only if the block
        takes long enough.

        Args:
            label: the name of the work.
            total: the amount of work; None: unknown.
            unit: "bytes", or a plural noun.
        """
        shown = self.for_people and not self.quiet and sys.stderr.isatty()
        bar = Progress(label, total, unit, self._bar_after_s if shown else None)
        try:
            yield bar
        finally:
            bar.close()


class Progress:
    """A progress bar that appears with the first update after `after_s` seconds; None shows no bar.

    Thread-safe, except that only one thread may call `advance`.

    >>> bar = Progress("Deleting", 3, "checkpoints", None)
    >>> bar.advance()
    >>> bar.done
    1
    """

    def __init__(self, label: str, total: int | None, unit: str, after_s: float | None) -> None:
        self._label = label
        self._unit = unit
        self._from_s = math.inf if after_s is None else time.monotonic() + after_s
        self._lock = threading.RLock()
        self.done = 0  # guarded by _lock
        self.total = total  # guarded by _lock
        self._bar: Any = None  # guarded by _lock
        self._task: Any = None  # guarded by _lock

    def advance(self, amount: int = 1) -> None:
        """Add to the amount of work that is done."""
        self.update(self.done + amount)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the amount of work that is done, and the total unless it is None."""
        with self._lock:
            self.done = done
            self.total = total if total is not None else self.total
            if self._bar is None and time.monotonic() >= self._from_s:
                self._bar = _make_bar()
                self._task = self._bar.add_task(self._label, total=self.total, amount="")
                self._bar.start()
            if self._bar is not None:
                amount = self._format_amount_locked()
                self._bar.update(self._task, completed=self.done, total=self.total, amount=amount)

    def aside(self, show: Callable[[], object]) -> None:
        """Call `show`, which prints, and hide the bar meanwhile."""
        with self._lock:
            bar = self._bar
            if bar is not None:
                bar.stop()
            try:
                show()
            finally:
                if bar is not None:
                    bar.start()

    def close(self) -> None:
        """Remove the bar. Idempotent."""
        with self._lock:
            bar, self._bar, self._from_s = self._bar, None, math.inf
        if bar is not None:
            bar.stop()

    def _format_amount_locked(self) -> str:
        shown = format_size if self._unit == "bytes" else "{:,}".format
        of_all = "" if self.total is None else f" of {shown(self.total)}"
        return f"{shown(self.done)}{of_all}{'' if self._unit == 'bytes' else f' {self._unit}'}"


def dump(model: Any) -> dict[str, Any]:
    """Return the fields of a value of the API as the command line of the reference client prints them.

    That command line leaves out one field, the base model of a checkpoint, which newer servers send.

    >>> from tinker_sync.types import Checkpoint
    >>> fields = {"checkpoint_id": "weights/a", "tinker_path": "tinker://run/weights/a"}
    >>> fields |= {"checkpoint_type": "training", "time": "2026-01-31", "base_model": "org/base"}
    >>> data = dump(Checkpoint(**fields))
    >>> "base_model" in data, data["size_bytes"] is None
    (False, True)
    """
    data: dict[str, Any] = model.model_dump()
    for each in (data, *data.values()):
        if isinstance(each, dict) and "checkpoint_id" in each:
            each.pop("base_model", None)
    return data


def _make_bar() -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[amount]}"),
        progress.TimeRemainingColumn(),
        console=_make_console(sys.stderr),
        transient=True,
    )


class _WarningLines(logging.Handler):
    """A log handler that prints the warnings and errors in this package's log, each text once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.quiet = False
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print the text of a record, unless a handler of the program or of `TINKER_LOG` also gets it."""
        if not logging.getLogger().handlers and logging.getLogger("tinker_sync").handlers == [self]:
            self.show(record.getMessage())

    def show(self, text: str) -> None:
        if not self.quiet and text not in self._shown:
            self._shown.add(text)
            sys.stderr.write(f"Warning: {text}\n")
            sys.stderr.flush()


_warning_lines: _WarningLines | None = None


@contextmanager
def show_warnings() -> Iterator[None]:
    """Print Python warnings, and warnings in this package's log, as plain lines while the block runs.

    Each text is printed once. `silence_warnings` ends the printing.
    """
    global _warning_lines  # noqa: PLW0603  # commands find it through `silence_warnings`
    log, lines = logging.getLogger("tinker_sync"), _WarningLines()
    before, _warning_lines = _warning_lines, lines
    log.addHandler(lines)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_args, **_named: lines.show(str(message))
            yield
    finally:
        log.removeHandler(lines)
        _warning_lines = before


def silence_warnings() -> None:
    """Print no more warnings until the present `show_warnings` block ends."""
    if _warning_lines is not None:
        _warning_lines.quiet = True


def _make_console(stream: IO[str]) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, emoji=False, markup=False)


def _read_line() -> str:
    """Return a line of stdin, or "" at its end.

    At a terminal, wait in short slices, because one long wait can miss a Ctrl-C.
    """
    if sys.stdin.isatty() and os.name != "nt":
        while not select.select([sys.stdin], [], [], slice_of(math.inf))[0]:
            pass
    return sys.stdin.readline()


@contextmanager
def write_whole(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file for writing. It appears at `path` when the block ends without an error.

    It then replaces an earlier file. A missing directory is created.

    Raises:
        CliError: the file cannot be written.
    """
    from tinker_sync._base.files import replacing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file
    except OSError as error:
        if error.strerror:  # errors of the network have no strerror
            raise CliError(f"cannot write {path}: {error.strerror}") from error
        raise
