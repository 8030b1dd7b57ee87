"""`ground_apart`: the ground of fault worlds with its server in a process of its own.

This process then holds the clients and the proxy alone, so that its memory is theirs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

from support.engine_ledger import Applied, engine_ledger
from support.fault_world import Ground, fault_server

from tinker_sync.clients.service import ServiceClient
from tinker_sync.local.server import sessions
from tinker_sync.testing.server import PACE


class _Serving:
    """The server and its ledger, in the process of the manager.

    Args:
        release_s: how long the server keeps the models of a session after its end.
        settings: settings of the server.
    """

    def __init__(self, release_s: float, settings: dict[str, Any]) -> None:
        sessions.RELEASE_S = release_s  # type: ignore[misc]
        self._stack = ExitStack()
        self._ledger = self._stack.enter_context(engine_ledger())
        self._server = self._stack.enter_context(fault_server(**settings))

    def address(self) -> tuple[str, str]:
        """Return the URL and the key of the server."""
        return self._server.url, self._server.key

    def with_marks(self, marks: list[Any]) -> list[list[Applied]]:
        return self._ledger.with_marks(marks)

    def forget(self) -> None:
        self._ledger.forget()
        self._ledger.saved.clear()
        self._server.forget()

    def close(self) -> None:
        self._stack.close()


class _Manager(BaseManager):
    """The process of the server."""


_Manager.register("Serving", _Serving)


class _Apart:
    """The server of the other process: takes the place of both the server and the ledger of a ground."""

    def __init__(self, serving: Any) -> None:
        self._serving = serving
        self.url, self.key = serving.address()

    def service(self, **options: Any) -> ServiceClient:
        usual = {"base_url": self.url, "api_key": self.key, "pace": PACE}
        return ServiceClient(**{**usual, **options})

    def with_marks(self, marks: Iterable[Any]) -> list[list[Applied]]:
        found: list[list[Applied]] = self._serving.with_marks(list(marks))
        return found

    def forget(self) -> None:
        self._serving.forget()


@contextmanager
def ground_apart(*, release_s: float, **settings: Any) -> Iterator[Ground]:
    """Start a server with a ledger in another process for the length of a block."""
    manager = _Manager(ctx=multiprocessing.get_context("spawn"))
    with manager:
        serving = manager.Serving(release_s, settings)  # type: ignore[attr-defined]
        apart = _Apart(serving)
        try:
            yield Ground(apart, apart)  # type: ignore[arg-type]
        finally:
            serving.close()
