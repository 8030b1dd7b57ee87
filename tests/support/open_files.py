"""Room for tests that hold more open files than most systems allow a program at first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_OTHERS = 256


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Let this process have that many files more, or skip the test where it may not."""
    import resource  # not on Windows; such tests do not run there

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHERS
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"the system allows {hard} open files")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
