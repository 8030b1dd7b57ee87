"""The application: finds the call of a request, checks the key, runs the handler, and answers.

It is an ASGI application: `tinker_sync.local.server.http` or any other ASGI server can run it, and another
application can wrap it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import ConfigurationError
from tinker_sync.local.server import account, checkpoints, promises, sampling, training
from tinker_sync.local.server.calls import Answer, Ask, Handler, Refused, refusal_of
from tinker_sync.local.server.http import Application
from tinker_sync.local.server.state import SHUTTING_DOWN, Flags, Service
from tinker_sync.wire import json as json_codec
from tinker_sync.wire import zstd
from tinker_sync.wire.dialect import Dialect
from tinker_sync.wire.endpoints import ENDPOINTS, NEWER, find
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

if TYPE_CHECKING:
    from tinker_sync.local.engine.host import Host
    from tinker_sync.local.server.http import Message, Receive, Send
    from tinker_sync.local.store import Store

HANDLERS: Final[Mapping[str, Handler]] = {
    name: handler
    for module in (account, checkpoints, promises, sampling, training)
    for name, handler in module.calls.items()
}  # fmt: skip

logger = logging.getLogger("tinker_sync.local")


def build(
    store: Store, host: Host, *, key: str, flags: Flags | None = None, clock: Clock = SYSTEM_CLOCK
) -> App:
    """Return the server as an ASGI application.

    Args:
        store: keeps all data that lasts. The caller closes it after the application has shut down.
        host: computes. The application closes it.
        key: the key that clients must send.
        flags: the settings of the server.
        clock: decides when tokens, signed addresses and unused sessions expire.

    Raises:
        ConfigurationError: there is no key, or a setting needs a package that is not installed.
    """
    if not key:
        raise ConfigurationError("a server needs a key")
    flags = flags or Flags()
    if flags.client.proto_compress_fwdbwd and not zstd.is_available():
        raise ConfigurationError("proto_compress_fwdbwd needs Python 3.14 or the package zstandard")
    return App(Service(store, host, flags=flags, key=key, clock=clock))


class App(Application):
    """The ASGI application of the server; `build` makes it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.max_body_bytes = service.flags.max_body_bytes
        # An older server lacks some calls. The clients' table of versions lists them.
        dialect = Dialect.forced("json")
        self._offered = {*ENDPOINTS, *NEWER}
        if service.flags.json_only:
            self._offered = {name for name in ENDPOINTS if dialect.offers(name)}
            self._offered -= {"client_config", "dynamic_config"}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answer = await self._answer(scope, receive)
        await _send(answer, send, head_only=scope["method"] == "HEAD")

    async def startup(self) -> None:
        """Start the timers of the service."""
        await self.service.start()

    async def shutdown(self) -> None:
        """Answer the waiting polls, and end all work."""
        await self.service.close()

    async def _answer(self, scope: Message, receive: Receive) -> Answer:
        try:
            return await self._handled(scope, receive)
        except Exception as problem:
            refused = refusal_of(problem)
            if refused is None and self.service.closing:
                refused = Refused(503, SHUTTING_DOWN)
            elif refused is None:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                refused = Refused(500, f"internal error: {type(problem).__name__}")
            elif refused.status >= 500 and not self.service.closing:
                logger.error("%s %s: %s", scope["method"], scope["path"], refused.detail)  # noqa: TRY400  # no bug
            # The conflict lasts, so clients that repeat a request after any 409 must not repeat this one.
            advice = {"x-should-retry": "false"} if refused.status == 409 else {}
            headers = {**advice, **refused.headers}
            return Answer(json_codec.dumps({"detail": refused.detail}), refused.status, headers=headers)

    async def _handled(self, scope: Message, receive: Receive) -> Answer:
        headers, path = _headers_of(scope), _path_of(scope)
        if path.startswith(checkpoints.PREFIX) and scope["method"] == "PUT":
            return await checkpoints.put_file(
                self.service, path, scope["query_string"], await _Watch(receive).body()
            )
        if path.startswith(checkpoints.PREFIX):
            return await checkpoints.fetch_file(
                self.service, scope["method"], path, scope["query_string"], headers
            )
        found = find("GET" if scope["method"] == "HEAD" else scope["method"], path)
        if found is None or found[0].name != "healthz":
            self._check_key(headers)
        if found is None or found[0].name not in self._offered:
            if self._has_other_method(path):
                raise Refused(405, "Method Not Allowed")
            raise Refused(404, "Not Found")
        endpoint, ids = found
        watch = _Watch(receive)
        body = _unpacked(await watch.body(), headers, self.service.flags.max_body_bytes)
        ask = Ask(
            endpoint=endpoint,
            ids=ids,
            query=dict(parse_qsl(scope["query_string"].decode("latin-1"))),
            headers=headers,
            body=body,
            credential=headers.get("x-api-key", ""),
            gone=watch.gone,
        )
        try:
            return await self._made(ask)
        except Exception as problem:
            refused = refusal_of(problem)
            if endpoint.number == "seq_id" and refused is not None and refused.status < 500:
                await self._skip_number(ask)
            raise

    async def _made(self, ask: Ask) -> Answer:
        name = ask.endpoint.name
        once = ask.endpoint.changes and ask.endpoint.number is None  # others are known by their number
        key = ask.headers.get("x-idempotency-key") if once else None
        try:
            if key is None:
                made = await HANDLERS[name](self.service, ask)
            else:
                number = name, *ask.ids.values(), key
                made = await self.service.once(number, ask.digest, lambda: HANDLERS[name](self.service, ask))
        finally:
            self.service.note_ignored(ask.ignored)
        return made if isinstance(made, Answer) else Answer(json_codec.dumps(made))

    def keeps_body(self, scope: Message) -> bool:
        """Return False if the sender of a request has neither a key nor a signed address."""
        try:
            if _path_of(scope).startswith(checkpoints.PREFIX):
                checkpoints.check_address(self.service, _path_of(scope), scope["query_string"])
            else:
                self._check_key(_headers_of(scope))
        except Refused:
            return False
        return True

    def _check_key(self, headers: Mapping[str, str]) -> None:
        """Raise `Refused` unless the request has a valid key or token."""
        credential = headers.get("x-api-key", "")
        if self.service.signer.knows(credential):
            return
        is_token = self.service.flags.client.pjwt_auth_enabled and credential.startswith("eyJ")
        # Clients get a new token and repeat the call only if the header has this text.
        advice = {"www-authenticate": 'Bearer error="invalid_token"'} if is_token else {}
        raise Refused(401, "the X-API-Key header holds no valid key", advice)

    async def _skip_number(self, ask: Ask) -> None:
        """Let the other requests of a model not wait for the number of a refused one, if that can be read."""
        with contextlib.suppress(ValueError, RecursionError):
            tree = await self.service.on_disk(json.loads, ask.body)
            match tree:
                case {"model_id": str(run_id), "seq_id": int(number)} if run_id in self.service.models:
                    self.service.models[run_id].lane.refuse(number)

    def _has_other_method(self, path: str) -> bool:
        """Return True if a call that the server offers has this path and another method.

        The status is then 405 instead of 404. Clients that probe for a call rely on the difference.
        """
        hits = [find(method, path) for method in ("GET", "POST", "PUT", "DELETE")]
        return any(hit is not None and hit[0].name in self._offered for hit in hits)


def _headers_of(scope: Message) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _path_of(scope: Message) -> str:
    path: str = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
    return path


class _Watch:
    """A reader of one request: `body` reads its body, and `gone` then waits until the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def body(self) -> bytes:
        parts = []
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise Refused(400, "the request was not complete")
            parts.append(event.get("body", b""))
            if not event.get("more_body", False):
                return b"".join(parts) if len(parts) > 1 else parts[0]

    def gone(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._receive())


async def _send(answer: Answer, send: Send, *, head_only: bool) -> None:
    headers = [(b"content-type", answer.content_type.encode())]
    headers += [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if answer.stream is not None and not head_only:

        async def write(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        await answer.stream(write)
    await send({"type": "http.response.body", "body": answer.body})


# ------------------------------------------------------------------------------------------ compressed bodies


def _unpacked(body: bytes, headers: Mapping[str, str], limit: int) -> bytes:
    """Return a request body, decompressed.

    Raises:
        Refused: the body is damaged or larger than `limit`, or its compression is not supported.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if len(body) > limit:
        raise Refused(413, f"at most {limit} bytes are taken")
    if coding == "identity" or not body:
        return body
    if coding == "zstd":
        return _unzstd(body, limit)
    if coding in ("gzip", "deflate"):
        unpacker = zlib.decompressobj(wbits=47)  # zlib or gzip
        try:
            out = unpacker.decompress(body, limit + 1)
        except zlib.error as problem:
            raise Refused(400, f"the body is damaged: {problem}") from None
        if len(out) <= limit and not unpacker.eof:
            raise Refused(400, "the body is damaged: it ends too early")
        return _bounded(out, limit)
    raise Refused(415, f"content-encoding {coding!r} is not known")


def _unzstd(body: bytes, limit: int) -> bytes:
    if not zstd.is_available():
        raise Refused(415, "content-encoding 'zstd' needs Python 3.14 or the package zstandard on the server")
    try:
        return zstd.decompress(body, limit=limit)
    except MalformedMessage as problem:
        raise Refused(400, str(problem)) from None
    except MessageTooLarge:
        raise Refused(413, f"at most {limit} bytes are taken") from None


def _bounded(out: bytes, limit: int) -> bytes:
    if len(out) > limit:
        raise Refused(413, f"at most {limit} bytes are taken")
    return out
