"""The requests of a training client: encoded by `training_calls`, numbered and sent by workers.

A send queue calls what `sender` returns: it returns when the server has accepted the request, and hands the
promise to the fetcher. Bodies stay views of the user's arrays until they are sent; each is joined then, one
chunk's worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tinker_sync._clock import Clock
from tinker_sync.errors import DeadlineError
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.fetcher import Decode, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import current, named
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.runtime.server import Server
    from tinker_sync.runtime.session import Session


class TrainingPart:
    """One request, complete but for its number. Owned by the send queue once it is in it."""

    __slots__ = (
        "_encoded",
        "content_type",
        "deadline_at",
        "decode",
        "endpoint",
        "future",
        "headers",
        "made_at",
        "request_type",
        "sdk_method",
        "size",
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

    def bytes_for(self, number: int) -> bytes:
        """The body under its number. Asked for once: what it was made of is let go."""
        encoded, self._encoded = self._encoded, None
        assert encoded is not None  # noqa: S101  # the queue asks once
        return encoded(number)


def sender(server: Server, session: Session | None) -> Callable[[TrainingPart, int], None]:
    """Return what sends the parts of one training client: a function for workers, which returns when the
    server has accepted the request.
    """
    clock, secrets = server.connection.clock, server.connection.secrets

    def send(part: TrainingPart, number: int) -> None:
        machinery = server.start()
        if session is not None:
            session.refuse_lost()
        left_s = part.deadline_at - clock.now()
        if left_s <= 0:
            raise _too_late(part, clock)
        budget = machinery.train_bytes
        # What has no size worth counting waits for nobody's chunks.
        if part.size and not budget.acquire(part.size, None if math.isinf(left_s) else left_s):
            raise _too_late(part, clock)
        try:
            with named(part.sdk_method):
                call = make_call(
                    part.endpoint,
                    server.connection.settings,
                    body=part.bytes_for(number),
                    headers=part.headers,
                    content_type=part.content_type,
                    deadline_s=None if math.isinf(left_s) else left_s,
                    dialect=machinery.facts.dialect,
                )
            reply = server.send(call)
        finally:
            if part.size:
                budget.release(part.size)
        promise: UntypedAPIFuture = read_reply(part.endpoint, reply, secrets)
        part.future.mark_accepted(promise.request_id)
        machinery.fetcher.fetch(
            Promise(
                promise.request_id,
                part.request_type,
                wants_proto=ENDPOINTS[part.endpoint].result_as_protobuf,
                roundtrip_s=clock.now() - part.made_at,
                sdk_method=part.sdk_method,
            ),
            part.future,
            part.decode,
            deadline_at=part.deadline_at,
        )

    return send


def _too_late(part: TrainingPart, clock: Clock) -> DeadlineError:
    return DeadlineError(
        f"{part.endpoint} was not sent within the deadline",
        method="POST",
        path=ENDPOINTS[part.endpoint].path.text,
        waited_s=clock.now() - part.made_at,
        last_words="it waited for its turn",
    )
