"""Rules for the whole suite; what they are is in `support/isolation.py`."""

from __future__ import annotations

import os
import signal
import sys

import hypothesis
import pytest
from support import isolation, leaf_locks

# Before any module of the package is imported: its locks are watched from the first one on.
leaf_locks.install()

# No deadline: the suite also runs on busy machines. No database: a failure prints what reproduces it.
hypothesis.settings.register_profile("suite", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    if "SWITCH_S" in os.environ:
        sys.setswitchinterval(float(os.environ["SWITCH_S"]))
    # What a shell starts in the background ignores Ctrl-C, and a test that presses it would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A plugin rather than fixtures in this file: those would not reach the doctests in the package.
    config.pluginmanager.register(isolation, "tinker_sync-isolation")
