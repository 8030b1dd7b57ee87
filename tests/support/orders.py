"""Processes that read orders from a test, one JSON object a line, and fork a child for each order.

The process loads its modules once, so that a child starts within milliseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinker_sync

if TYPE_CHECKING:
    from typing_extensions import Self


class OrderedProcess:
    """A process that runs a module of the tests and answers each order with a line. Not thread-safe.

    Args:
        module: the name of the module to run as a script.
        arguments: the arguments of the script.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        root, tests = Path(tinker_sync.__file__).parents[1], Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tests}"},
        )

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send the process an order, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(120)


def fork(work: Callable[[int], object]) -> tuple[int, str]:
    """Call `work` in a forked child with the writing end of a pipe. Return the child's id and what it wrote.

    The parent waits until the child closes its end of the pipe, or dies.
    """
    hear, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(hear)
            work(tell)
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(hear) as told:
        return pid, told.read()


def answer(line: str) -> None:
    """Write a line to standard output: the answer to an order."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
