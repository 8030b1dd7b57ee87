"""Fixtures for pytest: a new server for each test, and a client of it.

Importing this module does not load the server; the first test that uses a fixture loads it.
The entry point, `-p` and `pytest_plugins` name this same module, so pytest registers it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tinker_sync.clients.service import ServiceClient
    from tinker_sync.testing.server import LocalServer


@pytest.fixture(scope="session")
def tinker_server_options() -> dict[str, Any]:
    """Return the arguments of the `LocalServer` that `tinker_server` yields; by default, no arguments.

    A `conftest.py` may override this fixture.

    @pytest.fixture(scope="session")
    def tinker_server_options():
        return {"model": "tinker-sync/random", "pace": 1.0}
    """
    return {}


@pytest.fixture
def tinker_server(tinker_server_options: dict[str, Any]) -> Iterator[LocalServer]:
    """Yield a new `tinker_sync.testing.LocalServer`. The tests of a process share the base weights.

    def test_it(tinker_server):
        tinker_server.plan = FaultPlan().on("asample", faults.status(503), nth=1)
    """
    from tinker_sync.testing.server import LocalServer

    with LocalServer(**tinker_server_options) as server:
        yield server


@pytest.fixture
def tinker_service(tinker_server: LocalServer) -> Iterator[ServiceClient]:
    """Yield a `ServiceClient` of `tinker_server`, which is closed after the test."""
    with tinker_server.service() as service:
        yield service
