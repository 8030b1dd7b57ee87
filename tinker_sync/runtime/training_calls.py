"""The calls of a training client. Each is an object that is checked, prepared and queued.

- Checked when it is made: its constructor refuses a request that no server accepts.
- Prepared when the server's settings and the model's id are known. `prepare` splits the data and encodes the
  requests. It raises the errors that depend on the server's settings. It runs in the call itself if the
  client is ready, else when the client becomes ready.
- Queued then, in the order of the calls. The send queue numbers and sends.

`TrainingLine` takes the calls through these steps. They run on the user's threads, and on one worker that
starts the calls that were held.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._lazy import LazyModule
from tinker_sync._observe import TokensUsed
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime.answers import (
    ExpectedOutputs,
    decode_pass,
    merge_pass,
    read_pass,
    read_result,
    read_settled,
    read_with_loss,
    weights_of,
)
from tinker_sync.runtime.byte_budget import DataChunk, split
from tinker_sync.runtime.combine import CombinedFuture
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.held_calls import HeldCalls
from tinker_sync.runtime.naming import Unread, current, find_call_site, named, watch
from tinker_sync.runtime.operation import Ended, NotTaken, Operation
from tinker_sync.runtime.send_queue import SendQueue
from tinker_sync.runtime.spending import CostEstimate, Limiter, Reservation, length_of
from tinker_sync.runtime.training_part import (
    TrainingPart,
    leave_unnumbered,
    number_json,
    number_proto,
    zstd_compressor,
)
from tinker_sync.transport.body import PiecedBody
from tinker_sync.types.datum import Datum, count_trained
from tinker_sync.types.model_input import ModelInput
from tinker_sync.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinker_sync.types.weights import LoadWeightsRequest
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import (
    check_checkpoint_name,
    json_body,
    normalise_forward_backward,
    refuse_missing_call,
    refuse_unsupported,
)
from tinker_sync.wire.endpoints import ENDPOINTS, JSON, PROTOBUF

if TYPE_CHECKING:
    from tinker_sync.journal.record import TrainingRecord
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.types.weights import SaveWeightsResponse
    from tinker_sync.wire.dialect import Dialect
    from tinker_sync.wire.proto import requests
else:  # it needs numpy
    requests = LazyModule("tinker_sync.wire.proto.requests")

_FORWARD: Final = "Forward"
_NOTHING_S: Final = 60.0
_CURVE_POINTS: Final = 10_000

Operations = Sequence[Operation[TrainingPart]]


class TrainingLine:
    """The calls of one training client: held until its model exists, then queued. Thread-safe."""

    def __init__(self, runtime: ClientRuntime, record: TrainingRecord | None = None) -> None:
        self.runtime = runtime
        self.record = record
        """The record of the calls in a journal; None without a journal."""
        send = runtime.training_sender()
        self._send = send if record is None else record.around(send, NotTaken)
        # A weak reference, because the line holds the queue: a cycle would keep a dropped client alive until
        # a garbage collection.
        send_nothing = partial(_send_nothing, weakref.ref(self))
        self.queue: SendQueue[TrainingPart] = SendQueue(
            self._send, runtime.run_sending, send_nothing, runtime.follow_sending
        )
        self.held = HeldCalls()
        self.model_id = ""
        """The id of the model; empty until the model exists. Set once."""
        self.passed = False
        """True once a pass was made that accumulates gradients."""
        self.curve: deque[tuple[float, float]] = deque(maxlen=_CURVE_POINTS)
        """The moment and the loss of each pass that accumulates gradients and has ended."""
        self._steps = 0
        self._failed_passes: deque[Unread] = deque()
        self.last_state: LoadWeightsRequest | None = None
        """The request that loads the last saved state, else the state the model was made from, else None."""

    def note_saved(self, read: Callable[..., SaveWeightsResponse], *answer: Any) -> SaveWeightsResponse:
        """Read the answer to a save, and store the path of the state for `TrainingClient.recover`.

        The path is there before the user has the result.
        """
        saved = read(*answer)
        self.last_state = LoadWeightsRequest(path=saved.path, optimizer=True)
        return saved

    def submit(self, call: TrainingCall) -> APIFuture[Any]:
        """Put a call into the send queue, or hold it until the model exists. Return its future at once.

        Raises:
            TinkerError: the server does not support the call, or the client is closed; nothing was sent.
        """
        if self.runtime.lifecycle.leaving:
            raise ClientClosedError
        if call.name == "optim_step":
            self._report_passes()
        if self.held.open:
            future = self.submit_first(call)
        else:
            future = call.wait_for_model(self.runtime.spending.limiters)
            if not self.held.hold(call):
                call.start()
        # Only after the call is queued: if Ctrl-C prevents that, its future never ends.
        if call.lasting:
            self.runtime.lifecycle.note_change(future)
        watch(future, find_call_site())
        if call.name.startswith("forward_backward"):
            self.passed = True
            future.when_done(partial(TrainingLine._note_pass, self, self._steps))
        return future

    def _note_pass(self, steps: int, passed: APIFuture[Any]) -> None:
        """Store the loss of a pass that has ended.

        Keep an unread failure until the next optimizer step, which logs it. Log it now if that step has been
        called already.
        """
        if not passed.cancelled() and passed._exception is None:
            metrics = passed.result(timeout=0).metrics
            loss = metrics.get("loss:mean", metrics.get("loss:sum"))
            if loss is not None:
                self.curve.append((self.runtime.clock.now(), loss))
        unread = passed.overlooked
        if unread is None:
            return
        if self._steps > steps:
            unread.log()
        else:
            self._failed_passes.append(unread)

    def _report_passes(self) -> None:
        """Log the unread failures of passes, because the next optimizer step lacks their gradients."""
        self._steps += 1
        while self._failed_passes:
            self._failed_passes.popleft().log()

    def submit_first(self, call: TrainingCall) -> APIFuture[Any]:
        """Put a call into the send queue now, ahead of the calls that are held. Return its future.

        Raises:
            TinkerError: the server does not support the call, or the client is closed; nothing was sent.
        """
        self.enter(call, call.prepare())
        return call.future

    def enter(self, call: TrainingCall, operations: Operations) -> None:
        """Put the prepared operations of a call into the queue."""
        if self.record is not None:
            self.record.mark(call, [part for operation in operations for part in operation.parts])
        # The future refers to the queue until the call ends, and so keeps the client alive.
        self.queue.put(*operations)
        try:
            self.runtime.run_soon(self.queue.take_in)
        except TinkerError as failure:
            call.future.fail(failure)  # so the queue passes over it
            raise

    def send_nothing(self, number: int, ended: Ended) -> None:
        """Send a forward pass over one token under the number of a refused request, which is unused.

        Servers that process requests in the order of their numbers hold back the requests after a missing
        number.

        Raises:
            TinkerError: the server has no forward passes.
        """
        if not self.runtime.ready().facts.dialect.keeps_numbers:
            ended(None)
            return
        token = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})
        whole = ForwardBackwardInput([token], "cross_entropy")
        deadline_at = self.runtime.clock.now() + _NOTHING_S
        (forward,) = PassCall(self, "forward", whole, deadline_at, forward_only=True).prepare()
        self._send(forward.parts[0], number, ended)


def _send_nothing(line_ref: weakref.ref[TrainingLine], number: int, ended: Ended) -> None:
    line = line_ref()
    if line is None:  # the client is gone, so no call follows
        ended(None)
    else:
        line.send_nothing(number, ended)


class TrainingCall(ABC):
    """One call of a training client. For one thread at a time.

    Args:
        line: the `TrainingLine` of the client.
        name: the name of the call, for errors.
        deadline_at: the time of the clock at which to give up.
    """

    def __init__(self, line: TrainingLine, name: str, deadline_at: float) -> None:
        self.line = line
        self.name = name
        self.deadline_at = deadline_at
        self.sdk_method = current()
        self.step = line.record.step if line.record is not None else None
        """The step of the user's loop, if a journal counts the steps."""
        self._limiters: tuple[Limiter, ...] | None = None
        self._future: APIFuture[Any] | None = None

    @property
    def future(self) -> APIFuture[Any]:
        """The user's future, which exists once the call is prepared or waits for its model."""
        assert self._future is not None  # noqa: S101  # made when the call is prepared, at the latest
        return self._future

    @property
    def lasting(self) -> bool:
        """True if the call has a lasting effect, so that the end of the client waits for it."""
        return False

    @abstractmethod
    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        """Make and return the future of a call that waits for its model.

        Keep `limiters`, the limits in force now.
        """

    @abstractmethod
    def prepare(self) -> Operations:
        """Return the operations for the queue.

        They are one operation and, for some calls, a second one behind it whose requests are not known yet.
        """

    def start(self) -> None:
        """Prepare and queue a call that was held. If the preparation fails, the call uses no number."""
        future = self.future
        if future.done():
            return
        try:
            with named(self.sdk_method):
                operations = self.prepare()
        except Exception as failure:  # noqa: BLE001  # the future raises it
            future.fail(failure)
            return
        try:
            self.line.enter(self, operations)
        except Exception as failure:  # noqa: BLE001  # closed meanwhile
            future.fail(failure)

    def fail(self, failure: Exception) -> None:
        """Fail the future of a call that was held."""
        self.future.fail(failure)


class OrderedCall(TrainingCall):
    """A call with one request, a JSON body and a JSON result.

    Args:
        line: the `TrainingLine` of the client.
        endpoint: the name of the endpoint.
        request: the request without its number, and without the model's id if that is not known yet.
        kind: the type of the result.
        deadline_at: the time of the clock at which to give up.
    """

    numbered = True
    """False for the last call of a model, whose body takes no number."""

    def __init__(
        self, line: TrainingLine, endpoint: str, request: Any, kind: type[Any], deadline_at: float
    ) -> None:
        super().__init__(line, endpoint, deadline_at)
        self._request = request
        self._kind = kind

    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        del limiters  # it uses no tokens
        return self._make_future()

    def _make_future(self) -> APIFuture[Any]:
        self._future = future = self.line.runtime.future()
        return future

    @property
    def lasting(self) -> bool:
        # Weights without a name last only as long as the session.
        named = self.name.startswith("save_") and self._request.path is not None
        return named or self.name == "optim_step"

    def prepare(self) -> Operations:
        runtime, request, kind, name = self.line.runtime, self._request, self._kind, self.name
        dialect = runtime.ready().facts.dialect
        if request.model_id != self.line.model_id:
            request = request.model_copy(update={"model_id": self.line.model_id})
        refuse_missing_call(self.name, dialect)
        refuse_unsupported(request, dialect)
        runtime.server.published.check_fields(self.name, request, dialect)
        if self.name in _NAMED and request.path is not None:
            check_checkpoint_name(request.path, dialect)
        future = self._future or self._make_future()
        read = partial(read_result, name, request.model_id, kind)
        part = TrainingPart(
            future,
            self.name,
            ENDPOINTS[self.name].promises or self.name,
            partial(number_json if self.numbered else leave_unnumbered, json_body(request, dialect)),
            partial(self.line.note_saved, read) if name == "save_weights" else read,
            size=0,
            content_type=JSON,
            deadline_at=self.deadline_at,
            made_at=runtime.clock.now(),
        )
        return [Operation(self.name, [part], future, alone=dialect.one_by_one)]


_NAMED: Final = ("save_weights", "save_weights_for_sampler")


class PassCall(TrainingCall):
    """One pass over any number of data, in as many requests as the server's limits require.

    Args:
        line: the `TrainingLine` of the client.
        name: the name of the call, for errors.
        whole: the data and the loss.
        deadline_at: the time of the clock at which to give up.
        forward_only: compute no gradients.

    Raises:
        InvalidInputError: the data cannot be sent.
    """

    def __init__(
        self,
        line: TrainingLine,
        name: str,
        whole: ForwardBackwardInput,
        deadline_at: float,
        *,
        forward_only: bool = False,
    ) -> None:
        super().__init__(line, name, deadline_at)
        whole.validate()
        self._whole = whole
        self._forward_only = forward_only
        self._trained = count_trained(whole.data)

    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        self._limiters = limiters
        return self._combined([])

    def prepare(self) -> Operations:
        runtime = self.line.runtime
        facts = runtime.ready().facts
        limits = facts.config
        if self._forward_only and not facts.dialect.forward_only:
            runtime.server.refuse_without_forward()
        with runtime.spending.reserve(self._plan, self._limiters) as pledge:
            chunks = split(
                self._whole.data,
                max_bytes=limits.fwdbwd_max_chunk_bytes_count,
                max_count=limits.fwdbwd_max_chunk_len,
            )
            pledge.parts = len(chunks)
            # The metrics of several chunks are reduced once, together.
            combined = len(chunks) > 1 or self._future is not None
            decode = read_pass if combined else partial(decode_pass, self._trained)
            began_s = runtime.clock.now()
            parts = [self._part(chunk, facts.dialect, pledge, decode) for chunk in chunks]
            if runtime.stopwatches:
                runtime.note_encoded(self.sdk_method, began_s)
            future = self._whole_of([part.future for part in parts])
            pledge.follow(future)
        alone = facts.dialect.one_by_one
        return [Operation(self.name, parts, future, limits.parallel_fwdbwd_chunks, alone)]

    def _plan(self) -> CostEstimate:
        return CostEstimate(model=self.line.model_id, trained=_tokens(self._whole.data))

    def _whole_of(self, futures: list[APIFuture[ForwardBackwardOutput]]) -> APIFuture[Any]:
        if isinstance(self._future, CombinedFuture):
            self._future.follow(futures)
        elif len(futures) == 1:
            self._future = futures[0]
        else:
            self._combined(futures)
        return self.future

    def _combined(self, futures: list[APIFuture[ForwardBackwardOutput]]) -> APIFuture[Any]:
        runtime = self.line.runtime
        self._future = future = CombinedFuture(
            futures, partial(merge_pass, self._trained), submit=runtime.callback_pool.run, clock=runtime.clock
        )
        return future

    def _part(self, chunk: DataChunk, dialect: Dialect, pledge: Reservation, decode: Any) -> TrainingPart:
        runtime, forward_only, model_id = self.line.runtime, self._forward_only, self.line.model_id
        part_input = self._whole
        if len(chunk.data) != len(part_input.data):
            part_input = part_input._with(data=list(chunk.data))
        if not dialect.knows_all:
            refuse_unsupported(part_input, dialect)
            part_input = normalise_forward_backward(part_input, dialect)
        if dialect.reads_data_only:
            decode = partial(read_with_loss, decode, weights_of(part_input))
        headers: dict[str, str] = {}
        if dialect.protobuf and (dialect.forward_only or not forward_only):
            buffers = requests.encode_forward_backward_request(
                ForwardBackwardRequest(part_input, model_id), forward_only=forward_only
            )
            endpoint, content_type = "forward_backward", PROTOBUF
            compress = zstd_compressor() if dialect.zstd else None
            if compress is not None:
                headers["Content-Encoding"] = "zstd"
            encoded: Callable[[int], bytes | PiecedBody] = partial(number_proto, buffers, compress)
        else:
            kind: type[Any] = ForwardRequest if forward_only else ForwardBackwardRequest
            endpoint, content_type = "forward" if forward_only else "forward_backward", JSON
            encoded = partial(wire_json.with_number, wire_json.encode(kind(part_input, model_id)))
        return TrainingPart(
            runtime.future(),
            endpoint,
            _FORWARD if forward_only else "ForwardBackward",
            encoded,
            partial(
                read_settled,
                decode,
                ExpectedOutputs.of(chunk.data, whole=not dialect.reads_data_only),
                pledge,
                TokensUsed(model=model_id, trained=_tokens(chunk.data)),
            ),
            size=chunk.size_bytes,
            content_type=content_type,
            headers=headers,
            deadline_at=self.deadline_at,
            made_at=runtime.clock.now(),
        )


def _tokens(data: Sequence[Datum]) -> int:
    total = 0
    for datum in data:
        length = datum.model_input.known_length()
        total += length_of(datum.model_input) if length is None else length
    return total
