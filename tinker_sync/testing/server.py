"""`LocalServer`: a real server on this machine whose calls go wrong as planned.

A thread of this process accepts requests, applies faults, records calls and runs the server. Time on the wire
is real; `pace` shortens pauses.
"""

from __future__ import annotations

import secrets
import tempfile
import weakref
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.left_out import refuse_arguments
from tinker_sync.errors import ConfigurationError
from tinker_sync.testing._scene import Scene
from tinker_sync.testing.plan import EVERY, FaultPlan, FaultRule, check_endpoint

if TYPE_CHECKING:
    from typing_extensions import Self

    from tinker_sync.clients.service import ServiceClient
    from tinker_sync.local.server.http import ServerThread
    from tinker_sync.testing.calls import RecordedCall

PACE: Final = 0.01
# The default time limit of `wait_for_calls`: a call that has not arrived by then does not arrive.
_PATIENCE_S: Final = 10.0


class LocalServer:
    """A server for tests: it trains and samples, records calls, and fails as planned.

    Use it in a `with` block, or call `start` and `close`. Thread-safe once it is started.

    With equal seeds, equal calls give equal numbers in every run, apart from rounding in samples that are
    computed together: the choices that clients leave to the server, such as the first weights of an adapter
    or the seed of a sample, follow from the server's `seed`.

    Args:
        plan: the faults and latencies; None: none.
        model: the base model: "tinker-sync/tiny", "tinker-sync/random" (nonsense, computed quickly), or a
            directory in the format of Hugging Face.
        seed: decides the choices that clients leave to the server.
        pace: the factor that multiplies the pauses of the clients from `service`, and the delays of the plan.
            1 is real time; the default shortens each pause and delay to a hundredth.
        key: the key that clients send; None: a new one.
        data_dir: the directory for checkpoints and other state; None: one that is removed at the end.
        json_only: accept and send JSON only, as servers before protobuf do.
        settings: other settings of the server, such as `fwdbwd_max_chunk_len=2` or `hold_s=1.0`.

    >>> from tinker_sync.testing import FaultPlan, LocalServer, faults
    >>> plan = FaultPlan().on("get_server_capabilities", faults.status(503), nth=1)
    >>> with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
    ...     [model.model_name for model in service.get_server_capabilities().supported_models]
    ['tinker-sync/random']
    >>> server.calls_to("get_server_capabilities")  # doctest: +NORMALIZE_WHITESPACE
    [<get_server_capabilities 1: 503, FixedReply(status=503, body=b'{"detail": "status 503"}')>,
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
        json_only: bool = False,
        **settings: Any,
    ) -> None:
        self.pace = pace
        """The factor for pauses."""
        self.key = key or f"tml-local-{secrets.token_hex(16)}"
        """The key that clients send."""
        self._model = fspath(model)
        self._data_dir = None if data_dir is None else Path(data_dir)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        refuse_arguments("LocalServer", settings)
        self._settings = {"seed": seed, "json_only": json_only, **settings}
        self._scene = Scene(plan or FaultPlan())
        self._parts: ExitStack | None = None
        self._thread: ServerThread | None = None
        self._port = 0
        self._services: weakref.WeakSet[ServiceClient] = weakref.WeakSet()

    # -------------------------------------------------------------------------------------- start and end

    def start(self) -> Self:
        """Start the server and return when it accepts requests.

        Raises:
            ConfigurationError: the server is running already, or cannot use the directory or a setting.
            InvalidInputError: there is no such model.
        """
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
        """End the server and start it again at the same address, as after a crash.

        Models, results and unsaved samplers are lost; sessions and checkpoints are not.

        Raises:
            ConfigurationError: the server is not running.
        """
        if self._thread is None:
            raise ConfigurationError("this server is not running")
        self._end()
        self._begin()

    def close(self) -> None:
        """Close the clients of `service` and end the server. Idempotent; `start` may follow.

        Raises:
            Exception: the first exception that a predicate of the plan has raised.
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
        from tinker_sync.local.engine.host import load_base_model
        from tinker_sync.local.running import assemble
        from tinker_sync.local.server.http import ServerThread
        from tinker_sync.testing._middleware import FaultMiddleware

        load_base_model(self._model)  # so that a wrong model is reported as an argument, not as a setting
        directory = self._data_dir or Path(self._temporary.name if self._temporary else "") / "data"
        with ExitStack() as parts:
            app = parts.enter_context(
                assemble(directory, key=self.key, models=[self._model], flags=self._settings)
            )
            # A restart uses the same port, so that clients find the server again.
            thread = ServerThread(
                FaultMiddleware(app, self._scene, pace=self.pace), key=self.key, port=self._port
            )
            parts.callback(thread.stop)  # before the store is closed
            thread.start()
            self._parts = parts.pop_all()
        self._thread, self._port = thread, thread.port

    def _end(self) -> None:
        parts, self._parts, self._thread = self._parts, None, None
        if parts is not None:
            parts.close()

    def _remove_state(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception:
            if exc_type is None:  # the test's own failure is more useful
                raise

    # -------------------------------------------------------------------------------------- for clients

    @property
    def url(self) -> str:
        """The base URL of the server.

        Raises:
            ConfigurationError: the server is not running.
        """
        if self._thread is None:
            raise ConfigurationError("this server is not running: use it in a `with` block")
        return self._thread.url

    def service(self, **options: Any) -> ServiceClient:
        """Create a client of this server; `close` also closes the client.

        Args:
            options: arguments of `ServiceClient`.

        Raises:
            ConfigurationError: the server is not running.
        """
        from tinker_sync._base.clock import paced
        from tinker_sync.clients.service import ServiceClient

        with paced(self.pace):
            service = ServiceClient(**{"base_url": self.url, "api_key": self.key, **options})
        self._services.add(service)
        return service

    def environment(self) -> dict[str, str]:
        """Return environment variables that point clients of any kind at this server.

        >>> with LocalServer(model="tinker-sync/random") as server:
        ...     sorted(server.environment())
        ['TINKER_API_KEY', 'TINKER_BASE_URL', 'TINKER_PACE']
        """
        return {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "TINKER_PACE": str(self.pace),
        }

    # -------------------------------------------------------------------------------------- for asserts

    @property
    def plan(self) -> FaultPlan:
        """The plan. A test may assign another one at any time; the new plan counts calls from 1."""
        return self._scene.plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        self._scene.follow(plan)

    @property
    def calls(self) -> list[RecordedCall]:
        """All recorded calls, in order of arrival."""
        return self._scene.calls

    def calls_to(self, endpoint: str) -> list[RecordedCall]:
        """Return the recorded calls of one endpoint, in order of arrival.

        Args:
            endpoint: the name in `tinker_sync.wire.endpoints`, or "*" for all calls.

        Raises:
            InvalidInputError: there is no such endpoint.
        """
        check_endpoint(endpoint)
        return [call for call in self.calls if endpoint in (EVERY, call.endpoint)]

    def wait_for_calls(
        self, endpoint: str, count: int = 1, *, timeout: float = _PATIENCE_S
    ) -> list[RecordedCall]:
        """Wait for a number of calls to an endpoint, and return all its calls in order of arrival.

        Args:
            endpoint: the name of the endpoint.
            count: the number of calls to wait for.
            timeout: the longest wait in seconds.

        Raises:
            TimeoutError: fewer calls have arrived within `timeout`.
            InvalidInputError: there is no such endpoint.
        """
        check_endpoint(endpoint)

        def enough(calls: list[RecordedCall]) -> bool:
            return sum(endpoint in (EVERY, call.endpoint) for call in calls) >= count

        if not self._scene.wait_until(enough, timeout):
            came = len(self.calls_to(endpoint))
            raise TimeoutError(f"expected {count} calls to {endpoint}, received {came} in {timeout:g} s")
        return self.calls_to(endpoint)

    @property
    def pending_faults(self) -> tuple[FaultRule, ...]:
        """The rules of the plan that have caused no fault yet; normally none at the end of a test."""
        return self._scene.pending

    def forget(self) -> None:
        """Drop the plan, the recorded calls and the errors of predicates; let expired sessions work again.

        Models and checkpoints stay.
        """
        self._scene.follow(FaultPlan())
        self._scene.forget()

    def __repr__(self) -> str:
        state = self._thread.url if self._thread is not None else "not running"
        return f"<LocalServer {state}, {len(self.calls)} calls>"
