"""Fixtures for pytest: a server of its own for each test, and a client of it.

Loading this loads nothing but the standard library; the server is loaded by the first test that wants one. It
is registered under its own name in every way there is (entry point, `-p`, `pytest_plugins`), so never twice.
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
    """Arguments for every `LocalServer` of the fixtures; override it in a `conftest.py`.

    @pytest.fixture(scope="session")
    def tinker_server_options():
        return {"model": "tinker-sync/random", "pace": 1.0}
    """
    return {}


@pytest.fixture
def tinker_server(tinker_server_options: dict[str, Any]) -> Iterator[LocalServer]:
    """A `tinker_sync.testing.LocalServer`, new for each test; base weights are read once for all.

    def test_it(tinker_server):
        tinker_server.plan = FaultPlan().on("asample", faults.status(503), nth=1)
    """
    from tinker_sync.testing.server import LocalServer

    with LocalServer(**tinker_server_options) as server:
        yield server


@pytest.fixture
def tinker_service(tinker_server: LocalServer) -> Iterator[ServiceClient]:
    """A `ServiceClient` of `tinker_server`."""
    with tinker_server.service() as service:
        yield service
