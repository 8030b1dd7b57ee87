"""`python -m tinker_sync.local` in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.clock import PATIENCE_S

import tinker_sync

ROOT = Path(tinker_sync.__file__).parents[1]


@contextmanager
def served(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `python -m tinker_sync.local` until the end of the block. Yield its process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tinker_sync.local", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(PATIENCE_S * 2, process.kill)
    watchdog.start()
    try:
        with process:
            assert process.stderr is not None
            first = process.stderr.readline()
            assert first.startswith("Serving on http://"), first + process.stderr.read()
            try:
                yield process, first.split()[2]
            finally:
                process.terminate()
    finally:
        watchdog.cancel()
        process.kill()
