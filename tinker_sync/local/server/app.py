"""The application: finds the call of a request, checks the key, runs the handler, and answers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import ConfigurationError
from tinker_sync.local.server import account, checkpoints, promises, sampling, training
from tinker_sync.local.server.calls import Ask, Handler, Refused, refusal_of
from tinker_sync.local.server.http import Answer, Application, Request
from tinker_sync.local.server.state import SHUTTING_DOWN, Flags, Service
from tinker_sync.wire import json as json_codec
from tinker_sync.wire import zstd
from tinker_sync.wire.dialect import Dialect
from tinker_sync.wire.endpoints import ENDPOINTS, NEWER, find
from tinker_sync.wire.http1.content import accepted_encodings, decode
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

if TYPE_CHECKING:
    from tinker_sync.local.engine.host import Host
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
    """Return the application of the server.

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
    """The application of the server; `build` makes it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.max_body_bytes = service.flags.max_body_bytes
        # An older server lacks some calls. The clients' table of versions lists them.
        dialect = Dialect.forced("json")
        self._offered = {*ENDPOINTS, *NEWER}
        if service.flags.json_only:
            self._offered = {name for name in ENDPOINTS if dialect.offers(name)}
            self._offered -= {"client_config", "dynamic_config"}

    async def startup(self) -> None:
        """Start the timers of the service."""
        await self.service.start()

    async def shutdown(self) -> None:
        """Answer the waiting polls, and end all work."""
        await self.service.close()

    async def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        try:
            return await self._handled(request)
        except Exception as problem:
            refused = refusal_of(problem)
            if refused is None and self.service.closing:
                refused = Refused(503, SHUTTING_DOWN)
            elif refused is None:
                logger.exception("%s %s failed", request.method, request.path)
                refused = Refused(500, f"internal error: {type(problem).__name__}")
            elif refused.status >= 500 and not self.service.closing:
                logger.error("%s %s: %s", request.method, request.path, refused.detail)  # noqa: TRY400  # no bug
            # The conflict lasts, so clients that repeat a request after any 409 must not repeat this one.
            advice = {"x-should-retry": "false"} if refused.status == 409 else {}
            headers = {**advice, **refused.headers}
            return Answer(json_codec.dumps({"detail": refused.detail}), refused.status, headers=headers)

    async def _handled(self, request: Request) -> Answer:
        if request.path.startswith(checkpoints.PREFIX):
            if request.method == "PUT":
                return await checkpoints.put_file(self.service, request)
            return await checkpoints.fetch_file(self.service, request)
        found = find("GET" if request.method == "HEAD" else request.method, request.path)
        if found is None or found[0].name != "healthz":
            self._check_key(request.headers)
        if found is None or found[0].name not in self._offered:
            if self._has_other_method(request.path):
                raise Refused(405, "Method Not Allowed")
            raise Refused(404, "Not Found")
        endpoint, ids = found
        ask = Ask(
            endpoint=endpoint,
            ids=ids,
            query=dict(parse_qsl(request.query)),
            headers=request.headers,
            body=_unpacked(request, self.service.flags.max_body_bytes),
            credential=request.headers.get("x-api-key", ""),
            gone=request.gone,
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

    def keeps_body(self, request: Request) -> bool:
        """Return False if the sender of a request has neither a key nor a signed address."""
        try:
            if request.path.startswith(checkpoints.PREFIX):
                checkpoints.check_address(self.service, request)
            else:
                self._check_key(request.headers)
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


def _unpacked(request: Request, limit: int) -> bytes:
    """Return the body of a request, decompressed.

    Raises:
        Refused: the body is damaged or larger than `limit`, or its compression is not supported.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", *accepted_encodings().split(", ")):
        needs = "; it needs Python 3.14 or the package zstandard on the server" if coding == "zstd" else ""
        raise Refused(415, f"content-encoding {coding!r} is not supported{needs}")
    try:
        body = decode(request.body, coding, limit=limit)
    except MalformedMessage as problem:
        raise Refused(400, str(problem)) from None
    except MessageTooLarge:
        body = None
    if body is None or len(body) > limit or len(request.body) > limit:
        raise Refused(413, f"at most {limit} bytes are taken")
    return body
