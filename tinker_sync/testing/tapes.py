"""`record` and `replay`: record a run against any server, and replay it in a test without the server.

Both start a server on this machine that clients use. The server of `record` forwards requests and keeps the
answers; the server of `replay` answers from a `Cassette`, the recorded requests and answers. Requests arrive
on the server's own thread. For `record`, a pool of workers forwards them.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import requests

from tinker_sync import _embedded
from tinker_sync._base.clock import SYSTEM_CLOCK
from tinker_sync._base.threads import DaemonThread
from tinker_sync.errors import ConfigurationError, InvalidInputError
from tinker_sync.local.server.http import Abort, Answer, Application, Request, ServerThread
from tinker_sync.testing.cassette import (
    PLAIN_SETTINGS,
    Cassette,
    RecordedExchange,
    RecordedReply,
    comparable,
    difference,
    kept_reply,
    key_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from tinker_sync.auth import Access
    from tinker_sync.clients.service import ServiceClient

_REPLAY_KEY: Final = "tml-replayed"
_UPSTREAM_S: Final = 600.0
# How long the end of a recording waits for requests whose client is gone.
_END_S: Final = 2.0
# The number of workers. Each request that waits for a result occupies one.
_AT_ONCE: Final = 128
# These headers belong to one connection, or the HTTP library sets them again.
_OF_THE_CONNECTION: Final = frozenset(
    {"connection", "content-length", "transfer-encoding", "expect", "host", "accept-encoding"}
)


def record(
    path: str | os.PathLike[str],
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    replayable: bool = True,
) -> RecordingProxy:
    """Return a server for a `with` block, which records a run into a file for `replay`.

    The block records all clients that are made in it without a `base_url`, also those of `tinker`, the
    vendor's package. The server's `service()` makes a client, too. The file holds prompts and answers; keys,
    tokens and signatures of addresses are masked. Downloads of files are not recorded.

    Args:
        path: the file; it is replaced when the block ends without an exception.
        base_url: the server; "local" is the embedded one; None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: as a new client finds one.
        replayable: tell clients not to use what a replay lacks, such as one poll for many samples. False
            leaves the settings of the server as they are, for a file that is only read.

    Raises:
        ConfigurationError: the address, the key or a setting in the environment cannot be used.

    >>> import pathlib, tempfile, tinker_sync
    >>> file = pathlib.Path(tempfile.mkdtemp(), "capabilities.cassette")
    >>> def count_models():
    ...     with tinker_sync.ServiceClient() as service:
    ...         return len(service.get_server_capabilities().supported_models)
    >>> with record(file, base_url="local"):
    ...     count_models()
    1
    >>> with replay(file):
    ...     count_models()
    1
    """
    from tinker_sync.auth import find_access

    access = find_access(base_url=base_url, api_key=api_key)
    return RecordingProxy(Path(path), access, replayable=replayable)


def replay(path: str | os.PathLike[str], *, strict: bool = True) -> ReplayServer:
    """Return a server for a `with` block, which answers requests from a file that `record` has made.

    Clients that are made in the block without a `base_url` use this server. Heartbeats, telemetry, cancels
    and the end of a session need no recorded answer.

    Args:
        path: the file.
        strict: raise `InvalidInputError` at the end of the block if a request had no answer in the file, even
            if the program has caught the error of that request.

    Raises:
        ConfigurationError: the file does not exist, or is not a cassette.
    """
    return ReplayServer(Cassette.load(path), str(path), strict=strict)


class CassetteServer(Application):
    """The base class of the servers of `record` and `replay`.

    In its `with` block, environment variables of this process make new clients use the server by default.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        """The key for its clients."""
        self._thread: ServerThread | None = None
        self._before: dict[str, str | None] = {}
        self._services: weakref.WeakSet[ServiceClient] = weakref.WeakSet()

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise ConfigurationError("this server is running already")
        self._begin()
        self._thread = ServerThread(self, key=self.key)
        self._thread.start()
        for name, value in self.environment().items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for service in list(self._services):
            service.close().result()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
        self._end(failed=exc_type is not None)

    @property
    def url(self) -> str:
        """The base URL of the server.

        Raises:
            ConfigurationError: the server is not running: its `with` block has not begun, or has ended.
        """
        if self._thread is None:
            raise ConfigurationError("this server is not running: use it in a `with` block")
        return self._thread.url

    def environment(self) -> dict[str, str]:
        """Return environment variables that point clients of any kind at this server."""
        return {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key}

    def service(self, **options: Any) -> ServiceClient:
        """Create a client of this server; the end of the block also closes the client.

        Args:
            options: arguments of `ServiceClient`.
        """
        from tinker_sync.clients.service import ServiceClient

        service = ServiceClient(**{"base_url": self.url, "api_key": self.key, **options})
        self._services.add(service)
        return service

    def _begin(self) -> None:
        """Prepare the server before it listens. Subclasses override this method."""

    def _end(self, *, failed: bool) -> None:
        """Clean up after the last request. Subclasses override this method.

        Args:
            failed: True if the block ended with an exception.
        """

    async def _answer(self, request: Request, target: str) -> RecordedReply | None:
        """Return the answer to a request, or None to drop the connection. Subclasses implement this."""
        raise NotImplementedError

    async def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        target = f"{request.path}?{request.query}" if request.query else request.path
        reply = await self._answer(request, target)
        if reply is None:
            raise Abort
        return Answer(reply.content, reply.status, content_type="", headers=reply.headers)


class _Forwarders:
    """Daemon threads that forward requests, each one at a time. For the event loop, except for `close`.

    A pool of the standard library would hold up the end of the process until the server has answered the last
    request, also one whose client is gone.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending = 0  # jobs that no thread has ended, also those whose client is gone

    async def run(self, work: Callable[[], RecordedReply | None]) -> RecordedReply | None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[RecordedReply | None] = loop.create_future()

        def settle(reply: RecordedReply | None, failure: BaseException | None) -> None:
            self._pending -= 1
            if ended.done():  # the client is gone
                return
            if failure is not None:
                ended.set_exception(failure)
            else:
                ended.set_result(reply)

        def job() -> None:
            reply, failure = None, None
            try:
                reply = work()
            except Exception as error:  # noqa: BLE001  # it belongs to the request
                failure = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, reply, failure)

        self._pending += 1
        if self._pending > len(self._threads) and len(self._threads) < _AT_ONCE:
            name = f"tinker-record-{len(self._threads)}"
            self._threads.append(DaemonThread(self._work, name))
            self._threads[-1].start()
        self._jobs.put(job)
        return await ended

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """End the threads. Those that still wait for the server after `_END_S` end with the process."""
        for _ in self._threads:
            self._jobs.put(None)
        until_s = SYSTEM_CLOCK.now() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - SYSTEM_CLOCK.now()))


class RecordingProxy(CassetteServer):
    """A server that forwards requests to another one and keeps the answers. `record` makes it."""

    def __init__(self, path: Path, access: Access, *, replayable: bool = True) -> None:
        super().__init__("" if access.api_key is None else access.api_key.reveal())
        self._path = path
        self._access = access
        self._replayable = replayable
        self._lock = threading.Lock()
        self.cassette = Cassette()  # guarded by _lock
        self.lost: list[tuple[int, str, str]] = []  # guarded by _lock
        """The requests without an answer: the number of exchanges before, the target, and the reason."""
        self._local = threading.local()
        self._sessions: list[requests.Session] = []  # guarded by _lock
        self._hold: Any = None

    @property
    def upstream(self) -> str:
        """The base URL of the server that is recorded."""
        return self._access.base_url

    @property
    def is_hosted(self) -> bool:
        """True if the hosted service is recorded."""
        return self._access.is_hosted

    def _begin(self) -> None:
        self._forwarders = _Forwarders()
        self._hold = _embedded.hold_server(self._access.base_url, self._access.api_key)
        if self._hold is not None:
            self._hold.start()

    def _end(self, *, failed: bool) -> None:
        self._forwarders.close()
        for session in self._sessions:
            session.close()
        if self._hold is not None:
            self._hold.release()
        if not failed:
            self.cassette.save(self._path)

    async def _answer(self, request: Request, target: str) -> RecordedReply | None:
        return await self._forwarders.run(partial(self._pass_on, request, target))

    def _pass_on(self, request: Request, target: str) -> RecordedReply | None:
        """Forward the request of a client to the recorded server, and record its answer. Runs on a worker.

        Returns:
            The answer, or None if none came.
        """
        sent = {name: value for name, value in request.headers.items() if name not in _OF_THE_CONNECTION}
        sent["accept-encoding"] = "identity"
        try:
            got = self._session().request(
                request.method,
                self._access.base_url + target,
                data=request.body,
                headers=sent,
                timeout=_UPSTREAM_S,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            with self._lock:
                self.lost.append((len(self.cassette.exchanges), target, type(error).__name__))
            return None  # the client tries again, as it does without the proxy
        secrets = [] if self._access.api_key is None else [self._access.api_key]
        received = {name.lower(): value for name, value in got.headers.items()}
        content = got.content
        if self._replayable and target.endswith("/client/config"):
            content = _plain(content)
        asked = comparable(request.headers.get("content-type", ""), request.body, secrets)
        kept = kept_reply(target, got.status_code, received, content, secrets, replayable=self._replayable)
        exchange = RecordedExchange(request.method, target, asked, kept)
        with self._lock:
            self.cassette.exchanges.append(exchange)
        passed = {name: value for name, value in received.items() if name not in _OF_THE_CONNECTION}
        passed.pop("content-encoding", None)
        return RecordedReply(got.status_code, passed, content)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.auth = _leave_headers_alone
            with self._lock:
                self._sessions.append(session)
        return session


class ReplayServer(CassetteServer):
    """A server that answers from a `Cassette`. `replay` makes it. Its one thread chooses the answers.

    Equal requests get their recorded answers in order, and then the last one again.
    """

    def __init__(self, cassette: Cassette, name: str, *, strict: bool = True) -> None:
        super().__init__(_REPLAY_KEY)
        self._name = name
        self._strict = strict
        self._exchanges = cassette.exchanges
        self._answers: dict[str, deque[RecordedReply]] = defaultdict(deque)
        for exchange in cassette.exchanges:
            self._answers[exchange.key].append(exchange.reply)
        self._asked: set[str] = set()
        self.misses: list[str] = []
        """A description of each request without an answer."""

    @property
    def unused(self) -> list[str]:
        """The keys of the recorded requests that the run has not made."""
        return [key for key in self._answers if key not in self._asked]

    def _end(self, *, failed: bool) -> None:
        if self._strict and self.misses and not failed:
            raise InvalidInputError(self.misses[0])

    async def _answer(self, request: Request, target: str) -> RecordedReply | None:
        asked = comparable(request.headers.get("content-type", ""), request.body)
        key = key_of(request.method, target, asked)
        answers = self._answers.get(key)
        if not answers:
            return self._miss(request.method, target, asked)
        self._asked.add(key)
        # The last answer is used again: a client may repeat a request, and polls go on.
        return answers.popleft() if len(answers) > 1 else answers[0]

    def _miss(self, method: str, target: str, asked: Any) -> RecordedReply:
        path = target.partition("?")[0]
        if path.endswith(("/telemetry", "/session_heartbeat", "/finish", "/cancel_future")):
            return RecordedReply(200, {"content-type": "application/json"}, b"{}")
        same_place = [one for one in self._exchanges if (one.method, one.target) == (method, target)]
        text = f"{self._name} has no answer to {method} {path}"
        if same_place:
            nearest = min(same_place, key=lambda one: len(difference(asked, one.request)))
            text += f"; the nearest request of the recording differs: {difference(asked, nearest.request)}"
        else:
            text += "; nothing was asked there when it was recorded"
        self.misses.append(f"{text}. Record it again if the program has changed.")
        content = json.dumps({"detail": self.misses[-1]}).encode()
        return RecordedReply(400, {"content-type": "application/json"}, content)


def _plain(content: bytes) -> bytes:
    """Return the settings of a server with the features turned off that a cassette cannot record.

    Args:
        content: the settings as JSON; other content is returned unchanged.
    """
    tree = None
    with suppress(ValueError):
        tree = json.loads(content)
    if not isinstance(tree, dict):
        return content
    kept = {name: value for name, value in PLAIN_SETTINGS.items() if name != "pjwt_auth_enabled"}
    return json.dumps(tree | kept).encode()


def _leave_headers_alone(request: Any) -> Any:
    """Return a request unchanged. With this `auth`, `requests` adds no password from the netrc file."""
    return request
