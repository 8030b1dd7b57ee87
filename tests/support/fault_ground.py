"""`ground_apart`: a `Ground` of fault worlds whose server runs in another process.

This process then has only the clients and the proxy, so its memory is theirs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

from support.engine_ledger import Applied, engine_ledger
from support.fault_world import Ground, fault_server
from support.pacing import quick_service

from tinker_sync.clients.service import ServiceClient
from tinker_sync.testing.server import PACE


class _Serving:
    """The server and its ledger, in the other process.

    Args:
        release_s: the seconds for which the server keeps the models of a session after the session has ended.
        settings: settings of the server.
    """

    def __init__(self, release_s: float, settings: dict[str, Any]) -> None:
        self._stack = ExitStack()
        self._ledger = self._stack.enter_context(engine_ledger())
        self._server = self._stack.enter_context(fault_server(release_s=release_s, **settings))

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
    """The manager that starts the other process, with `_Serving` in it."""


_Manager.register("Serving", _Serving)


class _Apart:
    """A stand-in for the server and the ledger of a ground. It passes each call on to the other process."""

    def __init__(self, serving: Any) -> None:
        self._serving = serving
        self.url, self.key = serving.address()

    def service(self, **options: Any) -> ServiceClient:
        return quick_service(PACE, **{"base_url": self.url, "api_key": self.key, **options})

    def with_marks(self, marks: Iterable[Any]) -> list[list[Applied]]:
        found: list[list[Applied]] = self._serving.with_marks(list(marks))
        return found

    def forget(self) -> None:
        self._serving.forget()


@contextmanager
def ground_apart(*, release_s: float, **settings: Any) -> Iterator[Ground]:
    """Run a server and a ledger in another process until the end of the block, and yield their ground."""
    manager = _Manager(ctx=multiprocessing.get_context("spawn"))
    with manager:
        serving = manager.Serving(release_s, settings)  # type: ignore[attr-defined]
        apart = _Apart(serving)
        try:
            yield Ground(apart, apart)  # type: ignore[arg-type]
        finally:
            serving.close()
