"""The one place where commands print: data to stdout as a table, JSON or JSON lines, talk to stderr.

Colour, table widths and progress bars are for terminals alone: what goes into a pipe or a file has none of
them, and with NO_COLOR no terminal gets colour either.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from tinker_sync.cli import words
from tinker_sync.cli.failures import CliError

if TYPE_CHECKING:
    from rich.console import Console

    from tinker_sync.cli.table import Table

Format = Literal["table", "json", "jsonl"]
FORMATS: Final = ("table", "json", "jsonl")
# What is over sooner needs no bar.
BAR_AFTER_S: Final = 1.0
_STYLES: Final = {"head": "bold", "key": "cyan", "plain": "", "faint": "bright_black", "title": "bold"}


class Sink:
    """Prints what a command has to say. For one thread, but for the bars.

    Args:
        form: how data is printed.
        quiet: keep talk and bars back; data, questions and errors are printed all the same.
        bar_after_s: how long something takes before a bar shows.
    """

    def __init__(self, form: Format = "table", *, quiet: bool = False, bar_after_s: float = BAR_AFTER_S):
        self.form = form
        self.quiet = quiet
        self._bar_after_s = bar_after_s

    @property
    def for_people(self) -> bool:
        """Whether tables are asked for, not data."""
        return self.form == "table"

    # -------------------------------------------------------------------------------------- data

    def show(self, data: Mapping[str, Any], table: Table, *, items: str | None = None) -> None:
        """Print a result.

        Args:
            data: for JSON; what has no JSON form is turned into text.
            table: for people.
            items: where in `data` the list is of which each entry is one JSON line; None: all is one line.
        """
        if self.form == "table":
            self._print_table(table)
        else:
            self.show_data(data, items=items)

    def show_data(self, data: Mapping[str, Any], *, items: str | None = None) -> None:
        """Print a result as JSON, of one kind or the other. Arguments as in `show`."""
        if self.form == "jsonl":
            for item in [data] if items is None else data[items]:
                self.item(item)
        else:
            self._write(json.dumps(data, indent=2, default=str))

    def item(self, item: Any) -> None:
        """Print one JSON line, at once."""
        self._write(json.dumps(item, default=str))

    def text(self, text: str = "", style: str = "") -> None:
        """Print a line for people, at once."""
        from rich.text import Text

        _console(sys.stdout).print(Text(text, style), soft_wrap=True)
        sys.stdout.flush()

    def raw(self, text: str) -> None:
        """Print a line exactly as it is."""
        self._write(text)

    def _write(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def _print_table(self, table: Table) -> None:
        from rich.text import Text

        from tinker_sync.cli.table import lay_out

        console = _console(sys.stdout)

        def put(pieces: Iterable[tuple[str, str]]) -> None:
            line = Text.assemble(*((text, _STYLES[style]) for text, style in pieces))
            line.rstrip()
            console.print(line, soft_wrap=True)

        if table.title:
            put([(table.title, "title")])
        if table.rows:
            if table.title:
                put([])
            for pieces in lay_out(table, console.width if console.is_terminal else None):
                put(pieces)
        if table.note:
            put([])
            put([(table.note, "faint")])

    # -------------------------------------------------------------------------------------- talk

    def say(self, text: str) -> None:
        """Tell people what happens; kept back when data is asked for into a pipe or with `quiet`."""
        if not self.quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        """Say what went wrong; never kept back."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def confirm(self, question: str) -> bool:
        """Ask, on stderr; only yes is yes.

        Raises:
            CliError: nobody is there to answer.
        """
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer:
            sys.stderr.write("\n")
            raise CliError("nobody answered the question", "Give --yes to go ahead without being asked.")
        return answer.strip().lower() in ("y", "yes")

    # -------------------------------------------------------------------------------------- progress

    @contextmanager
    def progress(self, label: str, total: int | None = None, *, unit: str = "") -> Iterator[Progress]:
        """Show a bar on stderr, if that is a terminal and the block takes long enough.

        Args:
            label: what is being done.
            total: how much there is to do; None: nobody knows.
            unit: "bytes", or a noun for what is counted.
        """
        shown = self.for_people and not self.quiet and sys.stderr.isatty()
        bar = Progress(label, total, unit, self._bar_after_s if shown else None)
        try:
            yield bar
        finally:
            bar.close()


class Progress:
    """A bar that shows once its work takes long. Thread-safe.

    >>> bar = Progress("Deleting", 3, "checkpoints", None)
    >>> bar.advance()
    >>> bar.done
    1
    """

    def __init__(self, label: str, total: int | None, unit: str, after_s: float | None) -> None:
        self._label = label
        self._unit = unit
        self._lock = threading.RLock()
        self.done = 0  # guarded by _lock
        self.total = total  # guarded by _lock
        self._bar: Any = None  # guarded by _lock
        self._task: Any = None  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._timer: threading.Timer | None = None
        if after_s is not None:
            self._timer = threading.Timer(after_s, self._start)
            self._timer.daemon = True
            self._timer.name = "tinker-progress"
            self._timer.start()

    def advance(self, amount: int = 1) -> None:
        """So much more is done."""
        self.update(self.done + amount)

    def update(self, done: int, total: int | None = None) -> None:
        """So much is done, of so much if that is known by now."""
        with self._lock:
            self.done = done
            self.total = total if total is not None else self.total
            if self._bar is not None:
                self._bar.update(
                    self._task, completed=self.done, total=self.total, amount=self._amount_locked()
                )

    def aside(self, say: Callable[[], object]) -> None:
        """Print something while the bar is out of the way."""
        with self._lock:
            bar = self._bar
            if bar is not None:
                bar.stop()
            try:
                say()
            finally:
                if bar is not None:
                    bar.start()

    def close(self) -> None:
        """Take the bar away. May be called again."""
        with self._lock:
            self._closed = True
            bar, self._bar = self._bar, None
        if self._timer is not None:
            self._timer.cancel()
            if self._timer is not threading.current_thread():
                self._timer.join()
        if bar is not None:
            bar.stop()

    def _start(self) -> None:
        bar = _rich_bar()
        with self._lock:
            if self._closed:
                return
            self._bar = bar
            self._task = bar.add_task(
                self._label, total=self.total, completed=self.done, amount=self._amount_locked()
            )
            bar.start()

    def _amount_locked(self) -> str:
        shown = words.size if self._unit == "bytes" else "{:,}".format
        of_all = "" if self.total is None else f" of {shown(self.total)}"
        return f"{shown(self.done)}{of_all}{'' if self._unit == 'bytes' else f' {self._unit}'}"


def _rich_bar() -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[amount]}"),
        progress.TimeRemainingColumn(),
        console=_console(sys.stderr),
        transient=True,
    )


def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, emoji=False, markup=False)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there when it is complete, and not at all otherwise.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.csv"
    >>> with whole_file(target) as file:
    ...     _ = file.write(b"1,2")
    ...     target.exists()
    False
    >>> target.read_bytes()
    b'1,2'

    Raises:
        CliError: it cannot be written.
    """
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        _give_usual_mode(draft)
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(draft)
        if isinstance(error, OSError) and error.strerror:  # those of the network have none
            raise CliError(f"cannot write {path}: {error.strerror}") from error
        raise


def _give_usual_mode(draft: str) -> None:
    """Drafts are private; what becomes of them has the mode any new file has."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(draft, 0o666 & ~mask)
