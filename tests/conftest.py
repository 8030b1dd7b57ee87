"""Installs the rules of `support/isolation.py` for the whole suite; fixtures of several rooms."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from _pytest.doctest import DoctestModule
from support import isolation, leaf_locks

# This must come before the import of any module of the package, so that all its locks are watched.
leaf_locks.install()

from support import handed_records  # noqa: E402
from support.tinker_stub import Stub, StubServer  # noqa: E402

from tinker_sync.runtime.futures import APIFuture  # noqa: E402

leaf_locks.watch(APIFuture, "_end")
handed_records.install()
caplog = handed_records.caplog

# The same examples in every run unless EXAMPLES asks for others, because what chance finds elsewhere must not
# fail a change. Without a limit of time, because the suite also runs on busy machines. Without a database,
# because a failure prints the example that reproduces it.
EXAMPLES = int(os.environ.get("EXAMPLES", "40"))
hypothesis.settings.register_profile(
    "suite",
    max_examples=EXAMPLES,
    derandomize="EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Collect doctests from the package and from `support`, but not from files of tests, which have none."""
    found = yield
    return [
        each for each in found if not (isinstance(each, DoctestModule) and file_path.name.startswith("test_"))
    ]


def pytest_collection_finish() -> None:
    """Exclude all loaded objects from garbage collections, so that tests that collect garbage are fast."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    if "SWITCH_S" in os.environ:
        sys.setswitchinterval(float(os.environ["SWITCH_S"]))
    # A process that a shell starts in the background ignores Ctrl-C, so tests that send it would hang.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A hang ends the process of pytest-xdist that has it. Then the whole run ends and names the test, because
    # pytest-xdist 3.8 would start another process and might wait for it without end.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"
    # Registered as a plugin, because fixtures of this file would not apply to the doctests in the package.
    config.pluginmanager.register(isolation, "tinker_sync-isolation")


@pytest.fixture
def stub() -> Iterator[Stub]:
    # By this setting clients recognise the newest servers.
    with StubServer(config={"custom_loss_server_side": False}) as stub:
        yield stub


@pytest.fixture(scope="module")
def one_embedded_server() -> Iterator[None]:
    """Let all clients of a module use one embedded server, because each would otherwise start its own."""
    let_go = isolation.hold_embedded_server()
    yield
    let_go()


@pytest.fixture
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Log nothing but disasters, where faults are the usual case."""
    caplog.set_level(logging.CRITICAL, "tinker_sync")


@pytest.fixture
def without_zstd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Python and its packages have no zstd."""
    from tinker_sync.wire import zstd

    for name in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    zstd._module.cache_clear()
    monkeypatch.setattr(zstd, "find_spec", lambda _: None)
    yield
    zstd._module.cache_clear()
