"""Programs of both clients, in processes that start within milliseconds.

The reference client takes seconds to import. A process for each client imports it once and forks a child for
each program, so that every program still has an interpreter without clients, connections and threads.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from support.orders import OrderedProcess, answer, fork

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_S = 100
"""The default limit of a program: two of them must end before `faulthandler_timeout` ends the whole run."""

_DUMP_S = 2


class HungError(AssertionError):
    """A program did not end in time. The text has the stacks of its threads."""


@frozen
class Ended:
    """The exit code of a program and its output."""

    code: int
    out: str
    err: str


class Programs:
    """The processes that fork the programs, one for each client. Programs of one client run one at a time."""

    def __init__(self) -> None:
        self._processes: dict[str, OrderedProcess] = {}
        self._locks = {package: threading.Lock() for package in ("tinker", "tinker_sync")}
        self._stack = ExitStack()
        self.remarks: list[str] = []
        """What the end of the test run should say."""

    def run(
        self,
        package: str,
        program: Path | str,
        *arguments: str,
        typed: str = "",
        environment: Mapping[str, str] | None = None,
        patience_s: int = PATIENCE_S,
    ) -> Ended:
        """Run a program and wait for its end.

        Args:
            package: the client to import first.
            program: a file, or the text of a program.
            arguments: the arguments of the program.
            typed: the standard input.
            environment: all environment variables; None for those of this process.
            patience_s: the seconds after which the program writes the stacks of its threads to its standard
                error, and is killed.
        """
        order = {
            "file" if isinstance(program, Path) else "text": str(program),
            "arguments": arguments,
            "typed": typed,
            "environment": dict(os.environ if environment is None else environment),
            "patience_s": patience_s,
        }
        with self._locks[package]:
            if package not in self._processes:
                process = OrderedProcess("interop.programs", package)
                self._processes[package] = self._stack.enter_context(process)
            return Ended(**self._processes[package].ask(**order))

    def results(self, package: str, program: Path | str, *arguments: str, **options: Any) -> Any:
        """Run a program, which must exit with 0, and return the JSON that it prints.

        Raises:
            HungError: if the program does not end in time.
        """
        ended = self.run(package, program, *arguments, **options)
        name = program.name if isinstance(program, Path) else "a program"
        if ended.code == -signal.SIGALRM:
            raise HungError(f"{name} {' '.join(arguments)} hangs with {package}:\n{ended.err}")
        assert ended.code == 0, f"{name} failed with {package}:\n{ended.err[-4000:]}"
        return json.loads(ended.out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _live(order: dict[str, Any], place: Path, tell: int) -> None:
    """Run the program of an order in this forked process, and end the process with its exit code.

    `place` is a directory for the files that stand for the standard streams.
    """
    del tell
    signal.alarm(order["patience_s"] + _DUMP_S)
    (place / "in").write_text(order["typed"], encoding="utf-8")
    for name, number, flags in (("in", 0, os.O_RDONLY), ("out", 1, os.O_WRONLY), ("err", 2, os.O_WRONLY)):
        os.dup2(os.open(place / name, flags | os.O_CREAT), number)
    faulthandler.dump_traceback_later(order["patience_s"], file=2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # as long as the process
    os.environ.clear()
    os.environ.update(order["environment"])
    code: Any = 0
    try:
        sys.argv = [order.get("file", "-c"), *order["arguments"]]
        if "file" in order:
            runpy.run_path(order["file"], run_name="__main__")
        else:
            exec(compile(order["text"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  # as the interpreter ends a program
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def main() -> None:
    package = sys.argv[1]
    importlib.import_module(package)
    importlib.import_module(f"{package}.types")
    importlib.import_module("interop.conftest")  # the scripts import it
    if importlib.util.find_spec("torch"):
        importlib.import_module("torch")  # for both packages, because the reference client imports it
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            pid, _ = fork(partial(_live, json.loads(line), place))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = {each: (place / each).read_text(encoding="utf-8") for each in ("out", "err")}
        answer(json.dumps({"code": code, **texts}))


if __name__ == "__main__":
    main()
