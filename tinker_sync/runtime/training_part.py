"""The requests of a training client: encoded by `training_calls`, numbered and sent by workers.

A send queue calls what `sender` returns: it returns when the server has accepted the request, and hands the
promise to the fetcher. Bodies stay views of the user's arrays until they are sent; each is joined then, one
chunk's worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tinker_sync.errors import DeadlineError
from tinker_sync.runtime.calls import read_reply
from tinker_sync.runtime.fetcher import Decode, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.runtime.core import Core


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

    def bytes_for(self, number: int) -> bytes:
        """The body under its number. Asked for once: what it was made of is let go."""
        encoded, self._encoded = self._encoded, None
        assert encoded is not None  # noqa: S101  # the queue asks once
        return encoded(number)


def sender(core: Core) -> Callable[[TrainingPart, int], None]:
    """What sends the parts of one training client. Runs on workers; returns when the server has accepted."""

    def send(part: TrainingPart, number: int) -> None:
        machinery = core.machinery
        left_s = part.deadline_at - core.clock.now()
        if left_s <= 0:
            raise _too_late(part, core)
        budget = machinery.train_bytes
        # What has no size worth counting waits for nobody's chunks.
        if part.size and not budget.acquire(part.size, None if math.isinf(left_s) else left_s):
            raise _too_late(part, core)
        try:
            reply = core.send(
                part.endpoint,
                part.bytes_for(number),
                content_type=part.content_type,
                headers=part.headers,
                deadline_s=None if math.isinf(left_s) else left_s,
            )
        finally:
            if part.size:
                budget.release(part.size)
        promise: UntypedAPIFuture = read_reply(part.endpoint, reply, core.secrets)
        part.future.mark_accepted(promise.request_id)
        machinery.fetcher.fetch(
            Promise(
                promise.request_id,
                part.request_type,
                wants_proto=ENDPOINTS[part.endpoint].result_as_protobuf,
                roundtrip_s=core.clock.now() - part.made_at,
            ),
            part.future,
            part.decode,
            deadline_at=part.deadline_at,
        )

    return send


def _too_late(part: TrainingPart, core: Core) -> DeadlineError:
    return DeadlineError(
        f"{part.endpoint} was not sent within the deadline",
        method="POST",
        path=ENDPOINTS[part.endpoint].path.text,
        waited_s=core.clock.now() - part.made_at,
        last_words="it waited for its turn",
    )
