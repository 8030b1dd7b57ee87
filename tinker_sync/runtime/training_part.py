"""The requests of a training client: encoded by `training_calls`, numbered and sent by workers.

A send queue calls the function that `sender` returns. That function sends one request. When the server has
accepted it, the function passes the promise to the fetcher and returns. A body consists of views of the
user's arrays until it is sent. Then they are joined, so each copy has the size of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker_sync._clock import Clock
from tinker_sync._policy import Meaning, Stage, rule_for
from tinker_sync.errors import (
    APIError,
    APIStatusError,
    ClientClosedError,
    DeadlineError,
    JournalError,
    TinkerError,
)
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.fetcher import Decode, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import current, named
from tinker_sync.runtime.send_queue import NotTaken
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.config import Settings
    from tinker_sync.runtime.server import Machinery, Server
    from tinker_sync.runtime.session import Session
    from tinker_sync.wire.dialect import Dialect


class TrainingPart:
    """One request, complete except for its number. The send queue owns it once it is appended."""

    __slots__ = (
        "_encoded",
        "content_type",
        "deadline_at",
        "decode",
        "endpoint",
        "future",
        "headers",
        "known",
        "made_at",
        "request_type",
        "sdk_method",
        "size",
        "step",
    )

    def __init__(
        self,
        future: APIFuture[Any],
        endpoint: str,
        request_type: str,
        encoded: Callable[[int], bytes],
        decode: Decode[Any],
        *,
        size: int,
        content_type: str,
        headers: Mapping[str, str] | None = None,
        deadline_at: float,
        made_at: float,
    ) -> None:
        self.future = future
        self.endpoint = endpoint
        self.request_type = request_type
        self._encoded: Callable[[int], bytes] | None = encoded
        self.decode = decode
        self.size = size
        self.content_type = content_type
        self.headers = headers or {}
        self.deadline_at = deadline_at
        self.made_at = made_at
        self.sdk_method = current()
        self.known: str | None = None
        """The request id of this request in a journal, if the server has accepted it in an earlier run."""
        self.step: int | None = None
        """The step of the user's loop, for a journal."""

    def bytes_for(self, number: int) -> bytes:
        """Return the body with its number. May be called once, because it drops the parts of the body."""
        encoded, self._encoded = self._encoded, None
        assert encoded is not None  # noqa: S101  # the queue asks once
        return encoded(number)

    def keep(self, body: bytes) -> None:
        """Put the body back after a look at it, so that `bytes_for` can be called once more."""
        self._encoded = lambda _number: body


def sender(server: Server, session: Session | None) -> Callable[[TrainingPart, int], None]:
    """Return a function that sends the parts of one training client.

    It is for workers, and it returns when the server has accepted the request.
    """
    clock, secrets = server.connection.clock, server.connection.secrets

    def send(part: TrainingPart, number: int) -> None:
        request_id = part.known or submit(part, number)
        part.future.mark_accepted(request_id)
        server.start().fetcher.fetch(
            Promise(
                request_id,
                part.request_type,
                wants_proto=ENDPOINTS[part.endpoint].result_as_protobuf,
                roundtrip_s=clock.now() - part.made_at,
                sdk_method=part.sdk_method,
            ),
            part.future,
            part.decode,
            deadline_at=part.deadline_at,
            on_gone=None if part.known is None else partial(_fail_gone, part, number),
        )

    def submit(part: TrainingPart, number: int) -> str:
        try:
            machinery = server.start()
            if session is not None:
                session.refuse_lost()
            reply = send_encoded(machinery, part, number)
        except TinkerError as error:
            if _may_be_taken(error):
                raise
            raise NotTaken from error
        promise: UntypedAPIFuture = read_reply(part.endpoint, reply, secrets)
        return promise.request_id

    def send_encoded(machinery: Machinery, part: TrainingPart, number: int) -> Reply:
        left_s = part.deadline_at - clock.now()
        if left_s <= 0:
            raise _too_late(part, clock)
        budget = machinery.train_bytes
        # A request of size 0 is not a chunk, and does not wait for chunks.
        if part.size and not budget.acquire(part.size, None if math.isinf(left_s) else left_s):
            raise _too_late(part, clock)
        try:
            return server.send(
                _call_of(part, number, server.connection.settings, machinery.facts.dialect, left_s)
            )
        finally:
            if part.size:
                budget.release(part.size)

    return send


def _call_of(part: TrainingPart, number: int, settings: Settings, dialect: Dialect, left_s: float) -> Call:
    """Return the call of a part.

    Raises:
        NotTaken: the call cannot be made, for example for lack of memory; nothing was sent.
    """
    try:
        with named(part.sdk_method):
            return make_call(
                part.endpoint,
                settings,
                body=part.bytes_for(number),
                headers=part.headers,
                content_type=part.content_type,
                deadline_s=None if math.isinf(left_s) else left_s,
                dialect=dialect,
            )
    except Exception as error:
        raise NotTaken from error


def _fail_gone(part: TrainingPart, number: int, gone: Exception) -> None:
    lost = JournalError(
        f"the result of {part.endpoint} (number {number}) was delivered before, and the server keeps it no "
        "longer; the call itself is done"
    )
    lost.__cause__ = gone
    part.future.fail(lost)


def _may_be_taken(error: TinkerError) -> bool:
    """Return True unless the server certainly does not have the request of a call that failed."""
    if error.ambiguous or isinstance(error, ClientClosedError):
        return True
    if isinstance(error, APIStatusError):
        untouched = rule_for(error.status_code, Stage.CALL).meaning is Meaning.UNTOUCHED
        return not (untouched or 400 <= error.status_code < 500)
    # Of the other errors, only an APIError with a cause other than a failed send leaves this open.
    return isinstance(error, APIError) and not isinstance(error.__cause__, (SendFailed, type(None)))


def _too_late(part: TrainingPart, clock: Clock) -> DeadlineError:
    return DeadlineError(
        f"{part.endpoint} was not sent within the deadline",
        method="POST",
        path=ENDPOINTS[part.endpoint].path.text,
        waited_s=clock.now() - part.made_at,
        last_words="it waited for its turn",
    )
