"""What clients share: their runtime, their default deadlines, and their creation in the background.

A training or sampling client is also the future of its own creation. The caller's thread checks the
arguments, takes the next number of the session and returns the object. A worker sends the requests.
`HeldCalls` holds the calls that are made meanwhile; they start when the client is ready, or fail with its
creation.

The error of a failed creation keeps its class; its message names the line that asked for the client. If no
call was held, and the program never reads that error, it is logged when the client is collected or the
process ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, MutableMapping
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tinker_sync._base import fork as _fork
from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.naming import carried
from tinker_sync.errors import ClientClosedError, TinkerError, with_words
from tinker_sync.runtime.futures import APIFuture, overlook
from tinker_sync.runtime.lazy import HeldCalls, Shared

if TYPE_CHECKING:
    from tinker_sync.runtime.client import ClientRuntime

T = TypeVar("T")

_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# What calls the code of this package in a command, and in a thread.
_CALLERS_OF_OURS: Final = frozenset({"click", "concurrent", "threading"})

# Default deadlines of calls, in seconds: long enough for every normal call, but finite.
_HOUR_S: Final = 3600.0

SAMPLE_S: Final = 4 * _HOUR_S
TRAIN_S: Final = 12 * _HOUR_S
SAVE_S: Final = 12 * _HOUR_S
CREATE_S: Final = 12 * _HOUR_S
REST_S: Final = 300.0


class BaseClient:
    """The base class of all clients, which gives access to the client's runtime."""

    _runtime: ClientRuntime

    def get_telemetry(self) -> None:
        """Return None, because this client reports nothing to the service. Existing scripts use this name.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.get_telemetry()
        """

    @property
    def holder(self) -> ClientRuntime:
        """The runtime of this client: its connections, its threads and its session.

        All clients of one service client share a runtime. So do all REST clients that are made without a
        service client, for the same server and key.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     rest = tinker_sync.RestClient(service.holder)
        ...     rest.holder is service.holder
        True
        """
        return self._runtime

    def __repr__(self) -> str:
        runtime = getattr(self, "_runtime", None)  # None if the constructor has failed
        address = f" {runtime.settings.base_url}" if runtime else ""
        return f"<{type(self).__name__}{address}>"


class SharedRuntimes:
    """A table with one open runtime for each key. Thread-safe.

    A key is, for example, a pair of address and API key.

    Args:
        runtimes: the mapping that holds the runtimes; a dictionary keeps them, and a weak mapping drops those
            that no client uses.
    """

    def __init__(self, runtimes: MutableMapping[Hashable, ClientRuntime]) -> None:
        self._shared = Shared(
            runtimes, is_usable=lambda runtime: not runtime.closed, discard=lambda runtime: runtime.close()
        )

    def get(self, place: Hashable, make: Callable[[], ClientRuntime]) -> ClientRuntime:
        """Return the open runtime of a key. Call `make`, which sends no request, if none is open."""
        return self._shared.get((place, _fork.generation()), make)


def users_line() -> str:
    """Return the innermost line of the user's code on the stack, such as ``script.py:12``.

    Return "" if there is none, as in a command of this package, or in a thread that began in it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_code.co_filename, frame.f_globals):
        frame = frame.f_back
    if _root_of(frame.f_globals) in _CALLERS_OF_OURS:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_between(filename: str, names: dict[str, Any]) -> bool:
    return filename.startswith(_PACKAGE) or _root_of(names) == "asyncio"


def _root_of(names: dict[str, Any]) -> str:
    return str(names.get("__name__")).partition(".")[0]


class ClientFuture(APIFuture[T], BaseClient):
    """A client that is also the future of its own creation. Thread-safe.

    Args:
        runtime: the runtime of the service client.
        held: holds the calls that are made before the client is ready.
    """

    _advice = ""
    _foreign = (
        "this client was not ready when the process was forked, and becomes ready in the parent only; call "
        ".result() on it before the fork, or make a client here"
    )

    def __init__(self, runtime: ClientRuntime, held: HeldCalls) -> None:
        super().__init__(
            submit=runtime.pools.callback.run, soon=runtime.lifecycle.run_soon, clock=runtime.clock
        )
        self._runtime = runtime
        self._held = held
        self._created_at = ""

    # -------------------------------------------------------------------------------------- waiting for it

    def result(self, timeout: float | None = None) -> T:
        """Wait until the client is ready, and return it.

        Args:
            timeout: the longest wait in seconds; None waits without a limit.

        Raises:
            TimeoutError: the client is not ready in time. The creation goes on.
            concurrent.futures.CancelledError: the creation was cancelled.
            TinkerError: the creation failed; the message names the line that asked for the client.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     client = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     client.result(timeout=60) is client
        True
        """
        try:
            super().result(timeout)
            return cast("T", self)
        finally:
            del self  # the failure's traceback holds this frame, and the client holds the failure

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the client in a running asyncio loop. Arguments and errors as in `result`.

        >>> import asyncio, tinker_sync
        >>> async def name_of_base(client):
        ...     return (await client.result_async(timeout=60)).get_base_model()
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     asyncio.run(name_of_base(service.create_sampling_client(base_model="tinker-sync/tiny")))
        'tinker-sync/tiny'
        """
        try:
            await super().result_async(timeout)
            return cast("T", self)
        finally:
            del self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the creation ends. Return its error, or None after a success. Arguments as in `result`.

        Raises:
            TimeoutError: the creation has not ended in time. It goes on.
            concurrent.futures.CancelledError: the creation was cancelled.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     client = service.create_lora_training_client("no/such-model")
        ...     type(client.exception()).__name__
        'BadRequestError'
        """
        return super().exception(timeout)

    def __repr__(self) -> str:
        if self._held.open:
            return f"<{type(self).__name__} {self._name()}>"
        made = f", created at {self._created_at}" if self._created_at else ""
        return f"{super().__repr__()[:-1]}{made}>"

    def _name(self) -> str:
        raise NotImplementedError

    # -------------------------------------------------------------------------------------- its creation

    def _become_ready(self) -> None:
        """Start the held calls, then wake the threads that wait for the client."""
        self._held.release()
        self.resolve(cast("T", None))  # the result is this object; holding itself would keep it alive

    def _fail_creation(self, failure: BaseException) -> None:
        if isinstance(failure, TinkerError):
            failure = copy_exception(failure)
            if self._created_at:
                with_words(failure, f"client created at {self._created_at}")
        self.fail(failure)

    def _goes_ahead(self) -> bool:
        """Return True if the client is ready, and False if its calls must be held.

        Raises:
            TinkerError: the creation has failed, or was under way when this process was forked.
        """
        if self._held.open:
            return True
        if self.done() and (failure := _failure_of(self)) is not None:
            raise copy_exception(failure)
        self._refuse_foreign_wait()
        return False

    def _ended(self) -> None:
        # Not `_failure_of`, which would count as a look of the user.
        failure = CancelledError() if self.cancelled() else self.failure
        if failure is None:
            return
        told = failure if isinstance(failure, Exception) else TinkerError(f"the client failed: {failure!r}")
        held = self._held.fail(told)
        if not held and not isinstance(failure, (CancelledError, ClientClosedError)):
            words = f"{type(self).__name__}: {type(failure).__name__}: {failure}"
            overlook(self, f"a client could not be created, and the error was never looked at: {words}")


def start(client: ClientFuture[Any], work: Callable[[], object]) -> None:
    """Run `work`, which creates the model or sampler at the server, on a worker. The work may block.

    Raises:
        ClientClosedError: the service client is closed.
        TinkerError: the system starts no thread for the creation.
    """
    _expect(client)
    try:
        _run(client, carried(partial(_carry_out, client, work)))
    except TinkerError:
        client.cancel()  # nobody has it
        raise


def start_after(client: ClientFuture[Any], call: APIFuture[T], work: Callable[[T], object]) -> None:
    """Create the client's sampler: run `work` with the result of `call` on a worker.

    If `call` fails, the client fails too. If the client is cancelled, `call` is cancelled.
    """
    _expect(client)
    client._when_done(lambda ended: call.cancel() if ended.cancelled() else None)
    call._when_done(partial(_go_on, client, carried(work)))


def ready(client: ClientFuture[Any]) -> None:
    """Mark a client as ready at once. Its creation needs no request."""
    client._become_ready()


def _expect(client: ClientFuture[Any]) -> None:
    client._created_at = users_line()
    client.holder.lifecycle.end_with_client(client)
    client._when_done(ClientFuture._ended)  # added last: only reads of the failure by the user count


def _go_on(client: ClientFuture[Any], work: Callable[[T], object], call: APIFuture[T]) -> None:
    failure = _failure_of(call)
    if failure is not None:
        client._fail_creation(failure)
        return
    try:
        _run(client, partial(_carry_out, client, lambda: work(call.result())))
    except TinkerError as refused:  # closed, or no thread is left
        client._fail_creation(refused)


def _run(client: ClientFuture[Any], job: Callable[[], object]) -> None:
    client.holder.server.refuse_closed()
    client.holder.pools.create.run_call(job)


def _carry_out(client: ClientFuture[Any], work: Callable[[], object]) -> None:
    """Run the work, then make the client ready, or fail it. Runs on a worker."""
    if not client._begin():
        return
    client._mark_sending()
    try:
        work()
        client._become_ready()
    except BaseException as failure:  # noqa: BLE001  # stored as the failure of the client
        client._fail_creation(failure)


def _failure_of(ended: APIFuture[Any]) -> BaseException | None:
    return CancelledError() if ended.cancelled() else APIFuture.exception(ended)
