"""Work in a forked child of the test process, with its failure as a failure of the test."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> None:
    """Call `work()` in a forked child, and fail with its traceback if it raises. It is killed after 60 s."""
    ear, mouth = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of threads and forks
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        said = b"."
        try:
            work()
        except BaseException:  # noqa: BLE001  # the parent reports it
            said = traceback.format_exc().encode()
        os.write(mouth, said)
        os._exit(0)
    os.close(mouth)
    with open(ear, "rb") as hears:
        said = hears.read()
    os.waitpid(child, 0)
    assert said == b".", said.decode() or "the child was killed"
