"""`LocalServer`: a real server on this machine, in which calls go wrong as planned.

Requests are taken, spoilt and remembered by a thread of this process; the server itself runs there too, or
in a process of its own. Time on the wire is real; pauses are not, `pace` shortens them.
"""

from __future__ import annotations

import secrets
import tempfile
import weakref
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import ConfigurationError
from tinker_sync.testing._scene import Scene
from tinker_sync.testing.plan import EVERY, FaultPlan, Rule, check_endpoint

if TYPE_CHECKING:
    from typing_extensions import Self

    from tinker_sync.clients.service import ServiceClient
    from tinker_sync.local.server.serving import ServerThread
    from tinker_sync.testing._embedded import Embedded
    from tinker_sync.testing._process import Separate
    from tinker_sync.testing.calls import RecordedCall

PACE: Final = 0.01
# A test that waits longer for a call waits for ever.
_PATIENCE_S: Final = 10.0


class LocalServer:
    """A server for tests: it trains and samples, remembers what it was asked, and fails as planned.

    Use it in a `with` block, or call `start` and `close`. Thread-safe once it is started.

    With equal seeds equal calls give equal numbers, in each run: what clients leave to the server, such as
    the first weights of an adapter or the seed of a sample, follows from the server's seed.

    Args:
        plan: what is to go wrong; None: nothing.
        model: the base model: "tinker-sync/tiny", "tinker-sync/random" (nonsense, computed at once), or a
            directory in the format of Hugging Face.
        seed: for whatever is left to the server.
        pace: pauses of the clients that `service` makes, and times of the plan, are multiplied by this. 1 is
            real time.
        key: what clients must show; None: a new one.
        data_dir: where checkpoints and the like are kept; None: in a directory that is removed at the end.
        process: run the server in a process of its own: slower to start, and it can be killed.
        json_only: speak as servers did before protobuf.
        settings: others of the server, such as `fwdbwd_max_chunk_len=2` or `hold_s=1.0`.

    >>> from tinker_sync.testing import FaultPlan, LocalServer, faults
    >>> plan = FaultPlan().on("get_server_capabilities", faults.status(503), nth=1)
    >>> with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
    ...     [model.model_name for model in service.get_server_capabilities().supported_models]
    ['tinker-sync/random']
    >>> server.calls_to("get_server_capabilities")  # doctest: +NORMALIZE_WHITESPACE
    [<get_server_capabilities 1: 503, Answered(status=503, body=b'{"detail": "status 503"}')>,
     <get_server_capabilities 2: 200>]
    """

    def __init__(
        self,
        plan: FaultPlan | None = None,
        *,
        model: str | PathLike[str] = "tinker-sync/tiny",
        seed: int = 0,
        pace: float = PACE,
        key: str | None = None,
        data_dir: str | PathLike[str] | None = None,
        process: bool = False,
        json_only: bool = False,
        **settings: Any,
    ) -> None:
        self.pace = pace
        """What pauses are multiplied by."""
        self.key = key or f"tml-local-{secrets.token_hex(16)}"
        """The key that clients need."""
        self._model = fspath(model)
        self._data_dir = None if data_dir is None else Path(data_dir)
        self._process = process
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._settings = {"seed": seed, "json_only": json_only, **settings}
        self._scene = Scene(plan or FaultPlan())
        self._inside: Embedded | Separate | None = None
        self._thread: ServerThread | None = None
        self._port = 0
        self._services: weakref.WeakSet[ServiceClient] = weakref.WeakSet()

    # -------------------------------------------------------------------------------------- its life

    def start(self) -> Self:
        """Begin to serve; returns when requests are taken."""
        if self._thread is not None:
            raise ConfigurationError("this server is running already")
        if self._data_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tinker-sync-")
        try:
            self._begin()
        except BaseException:
            self._remove_state()
            raise
        return self

    def restart(self) -> None:
        """End the server and begin anew at the same address, as after a crash.

        Models and sessions are lost, checkpoints are not. A server in a process of its own is killed.
        """
        if self._thread is None:
            raise ConfigurationError("this server is not running")
        self._end(kill=True)
        self._begin()

    def close(self) -> None:
        """End the clients of `service`, and the server. May be called twice, and `start` again after it.

        Raises:
            Exception: what a predicate of the plan has raised.
        """
        if self._thread is None:
            return
        for service in list(self._services):
            service.close().result()
        self._end()
        self._remove_state()
        for failure in self._scene.failures:
            raise failure

    def _begin(self) -> None:
        from tinker_sync.local.server.serving import ServerThread
        from tinker_sync.testing._embedded import Embedded
        from tinker_sync.testing._middleware import Faults
        from tinker_sync.testing._process import Separate

        directory = self._data_dir or Path(self._temporary.name if self._temporary else "") / "data"
        kind = Separate if self._process else Embedded
        self._inside = kind(model=self._model, key=self.key, data_dir=directory, settings=self._settings)
        app = Faults(self._inside.app, self._scene, pace=self.pace)
        # The same port after a restart, so that clients find it again.
        thread = ServerThread(app, key=self.key, port=self._port)
        try:
            thread.start()
        except BaseException:
            self._end()
            raise
        self._thread, self._port = thread, thread.port

    def _end(self, *, kill: bool = False) -> None:
        thread, self._thread = self._thread, None
        inside, self._inside = self._inside, None
        if kill and self._process:
            inside.kill()  # type: ignore[union-attr]  # it is of that kind
        if thread is not None:
            thread.stop()
        if inside is not None:
            inside.close()

    def _remove_state(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception:
            if exc_type is None:  # else the test's own failure says more
                raise

    # -------------------------------------------------------------------------------------- for clients

    @property
    def url(self) -> str:
        """The base URL."""
        if self._thread is None:
            raise ConfigurationError("this server is not running: use it in a `with` block")
        return self._thread.url

    def service(self, **options: Any) -> ServiceClient:
        """A new client of this server; closed with the server, at the latest.

        Args:
            options: as for `ServiceClient`.
        """
        from tinker_sync.clients.service import ServiceClient

        usual = {"base_url": self.url, "api_key": self.key, "pace": self.pace}
        service = ServiceClient(**{**usual, **options})
        self._services.add(service)
        return service

    def environment(self) -> dict[str, str]:
        """Environment variables by which clients of any kind find this server.

        >>> with LocalServer(model="tinker-sync/random") as server:
        ...     sorted(server.environment())
        ['TINKER_API_KEY', 'TINKER_BASE_URL', 'TINKER_PACE', 'TINKER_TELEMETRY']
        """
        return {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "TINKER_PACE": str(self.pace),
            "TINKER_TELEMETRY": "0",
        }

    # -------------------------------------------------------------------------------------- for asserts

    @property
    def plan(self) -> FaultPlan:
        """What is to go wrong. Assign another one at any time; its counting then begins with 1."""
        return self._scene.plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        self._scene.follow(plan)

    @property
    def calls(self) -> list[RecordedCall]:
        """Everything that was asked, in order of arrival."""
        return self._scene.calls

    def calls_to(self, endpoint: str) -> list[RecordedCall]:
        """What was asked of one endpoint, in order of arrival.

        Args:
            endpoint: its name in `tinker_sync.wire.endpoints`.
        """
        check_endpoint(endpoint)
        return [call for call in self.calls if endpoint in (EVERY, call.endpoint)]

    def wait_for_calls(
        self, endpoint: str, count: int = 1, *, timeout: float = _PATIENCE_S
    ) -> list[RecordedCall]:
        """The calls to an endpoint, as soon as so many have arrived.

        Args:
            endpoint: its name.
            count: how many.
            timeout: how long to wait for them, seconds.

        Raises:
            TimeoutError: they did not come.
        """
        check_endpoint(endpoint)

        def enough(calls: list[RecordedCall]) -> bool:
            return sum(endpoint in (EVERY, call.endpoint) for call in calls) >= count

        if not self._scene.wait_until(enough, timeout):
            came = len(self.calls_to(endpoint))
            raise TimeoutError(f"{count} calls to {endpoint} were awaited, {came} came in {timeout:g} s")
        return self.calls_to(endpoint)

    @property
    def pending_faults(self) -> tuple[Rule, ...]:
        """Faults of the plan that have not happened yet: none, where a test met all it was written for."""
        return self._scene.pending

    def forget(self) -> None:
        """Begin anew: no plan, no calls, no session has expired. Models and checkpoints stay."""
        self._scene.follow(FaultPlan())
        self._scene.forget()

    def __repr__(self) -> str:
        state = self._thread.url if self._thread is not None else "not running"
        return f"<LocalServer {state}, {len(self.calls)} calls>"
