"""The requests of a training client: encoded by `training_calls`, numbered and sent by workers.

A send queue passes each part to a `PartSender`, which makes a `Submission`. The poller sends it, and `Tries`
decides about repetitions. When the server has accepted the part, the fetcher polls for the result. A large
body consists of views of the user's arrays, also while it is sent; no copy of the data is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._clock import Clock
from tinker_sync._policy import Meaning, Stage, rule_for
from tinker_sync.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    BillingError,
    ClientClosedError,
    DeadlineError,
    JournalError,
    TinkerError,
)
from tinker_sync.runtime.billing import PAUSE_S
from tinker_sync.runtime.calls import make_call, read_promise
from tinker_sync.runtime.fetcher import Decode, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import current
from tinker_sync.runtime.operation import Ended, NotTaken
from tinker_sync.runtime.tickets import own_failure
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.endpoints import ENDPOINTS
from tinker_sync.wire.proto._fields import varint
from tinker_sync.wire.proto._writer import Buffers

if TYPE_CHECKING:
    from tinker_sync.runtime.byte_budget import ByteBudget
    from tinker_sync.runtime.server import Machinery, Server
    from tinker_sync.runtime.session import Session
    from tinker_sync.transport.caller import Tries

_SMALL_BYTES: Final = 64 * 1024
_SEQ_ID_TAG: Final = b"\x10"  # field 2, varint; a message may hold its fields in any order
# About eight small chunks are under way at once.
_LEAST_TRAIN_BYTES: Final = 2_000_000


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
        encoded: Callable[[int], bytes | PiecedBody],
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
        self._encoded: Callable[[int], bytes | PiecedBody] | None = encoded
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

    def bytes_for(self, number: int) -> bytes | PiecedBody:
        """Return the body with its number. May be called once, because it drops the parts of the body."""
        encoded, self._encoded = self._encoded, None
        assert encoded is not None  # noqa: S101  # the queue asks once
        return encoded(number)

    def keep(self, body: bytes | PiecedBody) -> None:
        """Store a body that was inspected, so that `bytes_for` can be called once more."""
        self._encoded = lambda _number: body


class PartSender:
    """A sender of the parts (requests) of one training client's calls. Thread-safe.

    Args:
        server: the server, with the poller that sends the requests.
        session: the session of the client; None for a client without one.
    """

    def __init__(self, server: Server, session: Session | None) -> None:
        self.server = server
        self.session = session
        self.clock = server.connection.clock

    def send(self, part: TrainingPart, number: int, ended: Ended) -> None:
        """Send a part on a worker. `ended` gets None when the server has accepted it, else the failure.

        The failure is `NotTaken` if the server certainly does not have the part.
        """
        if part.known is not None:
            self.await_result(part, part.known, on_gone=partial(_fail_gone, part, number))
            ended(None)
        else:
            Submission(self, part, ended).begin(number)

    def await_result(
        self, part: TrainingPart, request_id: str, on_gone: Callable[[Exception], object] | None = None
    ) -> None:
        """Poll for the result of a part that the server has accepted."""
        part.future.mark_accepted(request_id)
        self.server.start().fetcher.fetch(
            Promise(
                request_id,
                part.request_type,
                wants_proto=ENDPOINTS[part.endpoint].result_as_protobuf,
                roundtrip_s=self.clock.now() - part.made_at,
                sdk_method=part.sdk_method,
            ),
            part.future,
            part.decode,
            deadline_at=part.deadline_at,
            on_gone=on_gone,
        )


class Submission:
    """One part on its way to the server. `Tries` repeats it until it is accepted or has failed.

    Its steps follow one another, so one thread at a time runs a step.
    """

    __slots__ = ("_budget", "_call", "_ended", "_give_up_at", "_part", "_sender", "_taken_bytes", "_tries")

    _budget: ByteBudget
    _call: Call
    _tries: Tries

    def __init__(self, sender: PartSender, part: TrainingPart, ended: Ended) -> None:
        self._sender = sender
        self._part = part
        self._ended = ended
        self._taken_bytes = 0

    def begin(self, number: int) -> None:
        """Wait until the limit of bytes allows the part, and send it for the first time."""
        try:
            self._prepare(number)
        except MemoryError as error:  # nothing was sent
            self._end(_not_taken(error))
        except BaseException as error:  # noqa: BLE001  # any failure must end the send
            self._end(error)
        else:
            self._try()

    def _prepare(self, number: int) -> None:
        sender, part = self._sender, self._part
        machinery = sender.server.start()
        if sender.session is not None and sender.session._lost is not None:
            sender.session.refuse_lost()
        left_s = part.deadline_at - sender.clock.now()
        if left_s <= 0:
            raise _too_late(part, sender.clock)
        self._take_bytes(machinery, left_s)
        self._call = make_call(
            part.endpoint,
            sender.server.connection.settings,
            body=part.bytes_for(number),
            headers=part.headers,
            content_type=part.content_type,
            deadline_s=None if math.isinf(left_s) else left_s,
            dialect=machinery.facts.dialect,
            idempotency_key=sender.server.connection.caller.next_key(),
            sdk_method=part.sdk_method,
        )
        limit_s = sender.server.connection.settings.deadline_s
        self._give_up_at = part.deadline_at
        if math.isinf(left_s) and limit_s is not None:
            self._give_up_at = sender.clock.now() + limit_s
        self._tries = sender.server.connection.caller.tries(self._call)

    def _try(self) -> None:
        self._sender.server.poller.start(self._tries.next_try(), self._on_outcome)

    def _on_outcome(self, outcome: Reply | SendFailed) -> None:
        try:
            pause_s = self._after(outcome)
        except BaseException as error:  # noqa: BLE001  # as above
            self._end(error)
            return
        if pause_s is None:
            self._end(None)
        else:
            self._sender.server.poller.after(pause_s, self._try)

    def _after(self, outcome: Reply | SendFailed) -> float | None:
        """Return the pause before the next try, or None if the server has accepted the part."""
        server, part = self._sender.server, self._part
        if isinstance(outcome, SendFailed) and (cause := own_failure(outcome)) is not None:
            raise self._tries.explained(cause)
        try:
            found = self._tries.after(outcome)
        except BillingError:
            if not server.may_wait_out_billing(self._give_up_at):
                raise
            # The pause counts as time of the call.
            left_s = self._give_up_at - self._sender.clock.now() - PAUSE_S * server.connection.settings.pace
            self._call = self._call.but(deadline_s=None if math.isinf(left_s) else left_s)
            self._tries = server.connection.caller.tries(self._call)
            return PAUSE_S
        if not isinstance(found, Reply):
            return found
        try:
            request_id, _ = read_promise(part.endpoint, found, server.connection.secrets)
        except APIResponseValidationError as error:
            return self._tries.after_unreadable(error)
        self._give_back_bytes()
        self._sender.await_result(part, request_id)
        return None

    def _end(self, failure: BaseException | None) -> None:
        self._give_back_bytes()
        if isinstance(failure, APIConnectionError):
            failure = self._sender.server.closed_or(failure)
        if isinstance(failure, TinkerError) and not _may_be_taken(failure):
            failure = _not_taken(failure)
        self._ended(failure)

    def _take_bytes(self, machinery: Machinery, left_s: float) -> None:
        size = self._part.size
        if not size:  # it is not a chunk, and does not wait for chunks
            return
        self._budget = machinery.train_bytes
        # Each chunk under way uses a connection, so small chunks count more than their size.
        taken = max(size, _LEAST_TRAIN_BYTES)
        if not self._budget.acquire(taken, None if math.isinf(left_s) else left_s):
            raise _too_late(self._part, self._sender.clock)
        self._taken_bytes = taken

    def _give_back_bytes(self) -> None:
        taken, self._taken_bytes = self._taken_bytes, 0
        if taken:
            self._budget.release(taken)


def _not_taken(cause: Exception) -> NotTaken:
    refused = NotTaken()
    refused.__cause__ = cause
    return refused


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


# ------------------------------------------------------------------------------------------ bodies


number_json: Final = wire_json.with_number
"""Return a JSON body with its number."""


def leave_unnumbered(body: bytes, _number: int) -> bytes:
    """Return the body of a request that takes no number."""
    return body


def number_proto(
    buffers: Buffers, compress: Callable[[PiecedBody], bytes] | None, number: int
) -> bytes | PiecedBody:
    """Return a body with its number.

    A small body becomes one piece, so that it is sent in one packet with the HTTP head.
    """
    pieces = [*buffers.pieces, _SEQ_ID_TAG, varint(number)]
    if compress is not None:
        return compress(PiecedBody(pieces))
    return b"".join(pieces) if buffers.size <= _SMALL_BYTES else PiecedBody(pieces)


def zstd_compressor() -> Callable[[PiecedBody], bytes] | None:
    """Return a function that compresses a body, or None without the optional dependency.

    With None, bodies are sent uncompressed.
    """
    try:
        import zstandard
    except ImportError:
        return None

    def compress(body: PiecedBody) -> bytes:
        stream = zstandard.ZstdCompressor().compressobj(size=len(body))
        return b"".join([*map(stream.compress, body), stream.flush()])

    return compress
