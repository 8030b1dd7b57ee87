"""Scripts that tests run in their own processes, such as tests of the end of a process."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker_sync
from tinker_sync import types

PATIENCE_S = 120.0

PREAMBLE = """
import os, signal, sys, threading
from tinker_sync import types
from tinker_sync.clients.service import ServiceClient

PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)

def say(*words):  # several threads may call it, so a line is one write
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)

def hear():
    return sys.stdin.readline().strip()
"""

UNHURRIED = """
import tinker_sync.runtime.client
tinker_sync.runtime.client.EXIT_LIMIT_S = 60.0
"""


@dataclass
class Ended:
    """The exit code and output of a script that has ended."""

    code: int
    out: list[str]
    err: str
    took_s: float
    """The seconds from the test's last action on the script to its end."""


class Script:
    """A running script, which is killed at the end of the `with` block if it still runs.

    Its code runs after `PREAMBLE`, which defines `say` and `hear` for it: `say` writes a line that `hear` of
    this class returns, and `hear` returns a line that `say` of this class writes. With `strict`, its warnings
    are errors. With `unhurried`, its end gives the server a minute: a live one on a busy machine may need
    more than the usual second.
    """

    def __init__(
        self, text: str, *, strict: bool = True, unhurried: bool = False, **environment: str
    ) -> None:
        code = PREAMBLE + UNHURRIED * unhurried + textwrap.dedent(text)
        root, tests = Path(tinker_sync.__file__).parents[1], Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, *(["-W", "error"] if strict else []), "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tests)]), **environment},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._out: list[str] = []
        self._err: list[str] = []
        self._err_lines: queue.Queue[str] = queue.Queue()
        self._since = time.monotonic()
        self._readers = [threading.Thread(target=job) for job in (self._read_out, self._read_err)]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._out.append(line.rstrip("\n"))
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_err(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._err.append(line)
            self._err_lines.put(line.rstrip("\n"))

    def err_line(self) -> str:
        """Return the next line that the script writes to stderr."""
        return self._err_lines.get(timeout=PATIENCE_S)

    def hear(self) -> str:
        """Return the next line that the script writes to stdout."""
        line = self._lines.get(timeout=PATIENCE_S)
        if line is None:
            self._readers[1].join(PATIENCE_S)
            raise AssertionError(f"the script has ended: {''.join(self._err)}")
        return line

    def say(self, line: str = "") -> None:
        """Write a line to the standard input of the script."""
        assert self._process.stdin is not None
        self._since = time.monotonic()
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._since = time.monotonic()
        self._process.send_signal(number)

    def wait(self) -> Ended:
        """Wait for the end of the script, and return its exit code and output."""
        code = self._process.wait(PATIENCE_S)
        took_s = time.monotonic() - self._since
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return Ended(code, self._out, "".join(self._err), took_s)


# ----- Functions that tests run in other processes, in a module that pickle can import. Each takes a client.
def sample_twice(client: Any) -> tuple[int, list[list[int]]]:
    """Take two samples with a client. Return the id of this process, and the tokens of each sample."""
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
    futures = [client.sample(prompt, 1, params) for _ in range(2)]
    sampled = [list(future.result(120).sequences[0].tokens) for future in futures]
    return os.getpid(), sampled
