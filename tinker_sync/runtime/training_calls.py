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

from tinker_sync._base.events import TokensUsed
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
from tinker_sync.runtime.naming import Unread, current, find_call_site, log_if_unread, named
from tinker_sync.runtime.operation import Ended, Operation, Unanswered
from tinker_sync.runtime.send_queue import SendQueue
from tinker_sync.runtime.spending import CostEstimate, Limiter, Reservation, length_of
from tinker_sync.runtime.training_part import (
    EncodedPass,
    PartSender,
    TrainingPart,
    encode_pass,
    leave_unnumbered,
    number_json,
)
from tinker_sync.types.datum import Datum, count_trained
from tinker_sync.types.model_input import ModelInput
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput
from tinker_sync.types.weights import LoadWeightsRequest
from tinker_sync.wire.adapt import (
    check_checkpoint_name,
    json_body,
    normalise_forward_backward,
    refuse_missing_call,
    refuse_unsupported,
)
from tinker_sync.wire.endpoints import ENDPOINTS, JSON

if TYPE_CHECKING:
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.types.weights import SaveWeightsResponse
    from tinker_sync.wire.dialect import Dialect

_NOTHING_S: Final = 60.0
_CURVE_POINTS: Final = 10_000

Operations = Sequence[Operation[TrainingPart]]


class TrainingLine:
    """The calls of one training client: held until its model exists, then queued. Thread-safe."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self.runtime = runtime
        sender = PartSender(runtime)
        self._send = sender.send
        # Weak: the line holds the queue, and a cycle would keep a dropped client until a garbage collection.
        send_nothing = partial(_send_nothing, weakref.ref(self))
        self.queue: SendQueue[TrainingPart] = SendQueue(
            self._send, sender.run, send_nothing, sender.follow, sender.end_in_turn
        )
        self.held = HeldCalls()
        self.model_id = ""
        """The id of the model; empty until the model exists. Set once."""
        self.fillers: dict[int, TrainingPart] = {}
        """The requests without effect that the server may have, by their numbers; see `_send_nothing`."""
        self.curve: deque[tuple[float, float]] = deque(maxlen=_CURVE_POINTS)
        """The moment and the loss of the last passes that accumulate gradients and have succeeded."""
        self._steps = 0
        self._failed_passes: deque[Unread] = deque()
        self.last_state: LoadWeightsRequest | None = None
        """The request that loads the last saved state, else the state the model was made from, else None."""

    def note_saved(self, read: Callable[..., SaveWeightsResponse], *answer: Any) -> SaveWeightsResponse:
        """Read the result of a save, store its path for `TrainingClient.recover`, then return the result."""
        saved = read(*answer)
        self.last_state = LoadWeightsRequest(path=saved.path, optimizer=True)
        return saved

    def submit(self, call: TrainingCall) -> APIFuture[Any]:
        """Put a call into the send queue, or hold it until the model exists. Return its future at once.

        Raises:
            TinkerError: the client is closed; or, if the model exists, the server does not support the call
                or a budget refuses it. Nothing was sent.
        """
        if self.runtime.lifecycle.leaving:
            raise ClientClosedError
        if call.name == "optim_step":
            self._report_passes()
        if self.held.open:
            future = self.submit_first(call)
        else:
            future = call.wait_for_model(self.runtime.spending.limiters)
            self.runtime.lifecycle.end_in_turn(future, call.deadline_at, call.name)
            if not self.held.hold(call):
                try:
                    self.runtime.pools.enter.run_call(self.held.release)
                except TinkerError as failure:
                    call.fail(failure)  # so that no later call starts it
                    raise
        # Only after the call is queued: if Ctrl-C prevents that, its future never ends.
        if call.lasting:
            self.runtime.lifecycle.note_change(future)
        log_if_unread(future, find_call_site())
        if call.name.startswith("forward_backward"):
            future._when_done(partial(TrainingLine._note_pass, self, self._steps))
        return future

    def _note_pass(self, steps: int, passed: APIFuture[Any]) -> None:
        """Store the loss of a pass that has ended, or keep its unread failure.

        The next optimizer step logs the failure. If that step has been called already, log the failure now.

        Args:
            steps: the number of optimizer steps that were called before the pass.
        """
        if not passed.cancelled() and passed.failure is None:
            metrics = passed.result(timeout=0).metrics
            loss = metrics.get("loss:mean", metrics.get("loss:sum"))
            if loss is not None:
                self.curve.append((self.runtime.clock.now(), loss))
        unread = passed._overlooked
        if unread is None:
            return
        if self._steps > steps:
            unread.log()
        else:
            self._failed_passes.append(unread)

    def _report_passes(self) -> None:
        """Count an optimizer step. Log the unread failures of passes: the step lacks their gradients."""
        self._steps += 1
        while self._failed_passes:
            self._failed_passes.popleft().log()

    def submit_first(self, call: TrainingCall) -> APIFuture[Any]:
        """Put a call into the send queue now, ahead of the calls that are held. Return its future.

        Raises:
            TinkerError: the server does not support the call, a budget refuses it, the client is closed, or
                the system starts no thread for it; nothing was sent.
        """
        self.enter(call.prepare())
        return call.future

    def enter(self, operations: Operations) -> None:
        """Put the prepared operations of a call into the queue.

        Raises:
            TinkerError: the client is closed, or no thread can queue them. The future of the call fails too.
        """
        # The future refers to the queue until the call ends, and so keeps the client alive.
        self.queue.put(*operations)
        try:
            self.runtime.run_soon(self.queue.take_in)
        except TinkerError as failure:
            for operation in operations:
                operation.fail(failure)  # so the queue passes over it
            raise


def _send_nothing(line_ref: weakref.ref[TrainingLine], number: int, ended: Ended) -> None:
    """Send a forward pass over one token, which has no effect, under the unused number of a refused request.

    Servers that process requests in the order of their numbers hold back the requests after a missing number.
    For other servers, only call `ended(None)`. Raise a TinkerError if the server has no forward passes.
    """
    line = line_ref()
    # Without a client, no call follows.
    if line is None or not line.runtime.server.ready().facts.dialect.keeps_numbers:
        ended(None)
        return
    deadline_at = line.runtime.clock.now() + _NOTHING_S
    part = line.fillers.get(number)
    if part is None:
        token = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})
        whole = ForwardBackwardInput([token], "cross_entropy")
        call = PassCall(line, "forward", whole, deadline_at, forward_only=True)
        call.wait_for_model(())  # no budget may refuse it
        (forward,) = call.prepare()
        part = line.fillers[number] = forward.parts[0]
        part.future.cancel()  # nobody needs the result
    part.deadline_at = deadline_at

    def end(failure: BaseException | None) -> None:
        if not isinstance(failure, Unanswered):
            line.fillers.pop(number, None)
        ended(failure)

    line._send(part, number, end)


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

        Args:
            limiters: the limits in force now; `prepare` asks them later.
        """

    @abstractmethod
    def prepare(self) -> Operations:
        """Return the operations for the queue: one and, for some calls, a second one behind it, whose
        requests are not known yet.

        Raises:
            TinkerError: the server does not support the call, or a budget refuses it.
        """

    def start(self) -> None:
        """Prepare and queue a call that was held. If that fails, fail its future; the call uses no number."""
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
            self.line.enter(operations)
        except Exception as failure:  # noqa: BLE001  # closed meanwhile
            future.fail(failure)

    def fail(self, failure: Exception) -> None:
        """Fail the future of a call that was held."""
        self.future.fail(failure)


class OrderedCall(TrainingCall):
    """A call of one request with a JSON body and a JSON result, such as `optim_step` or `save_weights`.

    Args:
        line, deadline_at: as in `TrainingCall`.
        endpoint: the name of the endpoint.
        request: the request without its number, and without the model's id if that is not known yet.
        kind: the type of the result.
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
        self._future = future = self.line.runtime.lifecycle.make_future()
        return future

    @property
    def lasting(self) -> bool:
        # Weights without a name last only as long as the session.
        named = self.name.startswith("save_") and self._request.path is not None
        return named or self.name == "optim_step"

    def prepare(self) -> Operations:
        runtime, request, kind, name = self.line.runtime, self._request, self._kind, self.name
        dialect = runtime.server.ready().facts.dialect
        if request.model_id != self.line.model_id:
            request = request.model_copy(update={"model_id": self.line.model_id})
        refuse_missing_call(self.name, dialect)
        refuse_unsupported(request, dialect)
        runtime.server.published.check_fields(self.name, request, dialect)
        if self.name in ("save_weights", "save_weights_for_sampler") and request.path is not None:
            check_checkpoint_name(request.path, dialect)
        body = json_body(request, dialect)
        future = self._future or self._make_future()
        read = partial(read_result, name, request.model_id, kind)
        part = TrainingPart(
            future,
            self.name,
            ENDPOINTS[self.name].promises or self.name,
            partial(number_json if self.numbered else leave_unnumbered, body),
            partial(self.line.note_saved, read) if name == "save_weights" else read,
            size=0,
            content_type=JSON,
            deadline_at=self.deadline_at,
            made_at=runtime.clock.now(),
        )
        return [Operation(self.name, [part], future, alone=dialect.one_by_one)]


class PassCall(TrainingCall):
    """One forward or forward-backward pass over data, in as many requests as the server's limits require.

    Args:
        line, name, deadline_at: as in `TrainingCall`.
        whole: the data and the loss.
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
        return self._combine([])

    def prepare(self) -> Operations:
        runtime = self.line.runtime
        facts = runtime.server.ready().facts
        limits = facts.config
        if self._forward_only and not facts.dialect.forward_only:
            runtime.server.refuse_without_forward()
        with runtime.spending.reserve(self._estimate_cost, self._limiters) as reservation:
            chunks = split(
                self._whole.data,
                max_bytes=limits.fwdbwd_max_chunk_bytes_count,
                max_count=limits.fwdbwd_max_chunk_len,
            )
            reservation.parts = len(chunks)
            # The metrics of several chunks are reduced once, together.
            combined = len(chunks) > 1 or self._future is not None
            decode = read_pass if combined else partial(decode_pass, self._trained)
            began_s = runtime.clock.now()
            # All chunks before the first future, because a chunk that cannot be encoded refuses the call.
            encoded = [self._encode(chunk, facts.dialect) for chunk in chunks]
            parts = [
                self._make_part(chunk, *made, facts.dialect, reservation, decode)
                for chunk, made in zip(chunks, encoded, strict=True)
            ]
            if runtime.lifecycle.stopwatches:
                runtime.lifecycle.note_encoded(self.sdk_method, began_s)
            future = self._set_parts([part.future for part in parts])
            reservation.follow(future)
        alone = facts.dialect.one_by_one
        return [Operation(self.name, parts, future, limits.parallel_fwdbwd_chunks, alone)]

    def _estimate_cost(self) -> CostEstimate:
        return CostEstimate(model=self.line.model_id, trained=_tokens(self._whole.data))

    def _set_parts(self, futures: list[APIFuture[ForwardBackwardOutput]]) -> APIFuture[Any]:
        if isinstance(self._future, CombinedFuture):
            self._future.follow(futures)
        elif len(futures) == 1:
            self._future = futures[0]
        else:
            self._combine(futures)
        return self.future

    def _combine(self, futures: list[APIFuture[ForwardBackwardOutput]]) -> APIFuture[Any]:
        runtime = self.line.runtime
        self._future = future = CombinedFuture(
            futures,
            partial(merge_pass, self._trained),
            submit=runtime.pools.callback.run,
            soon=runtime.lifecycle.run_soon,
            clock=runtime.clock,
        )
        return future

    def _encode(self, chunk: DataChunk, dialect: Dialect) -> tuple[ForwardBackwardInput, EncodedPass]:
        part_input = self._whole
        if len(chunk.data) != len(part_input.data):
            part_input = part_input._with(data=list(chunk.data))
        if not dialect.knows_all:
            refuse_unsupported(part_input, dialect)
            part_input = normalise_forward_backward(part_input, dialect)
        return part_input, encode_pass(
            part_input, self.line.model_id, dialect, forward_only=self._forward_only
        )

    def _make_part(
        self,
        chunk: DataChunk,
        part_input: ForwardBackwardInput,
        encoded: EncodedPass,
        dialect: Dialect,
        reservation: Reservation,
        decode: Any,
    ) -> TrainingPart:
        runtime = self.line.runtime
        used = TokensUsed(model=self.line.model_id, trained=_tokens(chunk.data))
        settle = partial(reservation.settle, used, id(chunk))
        if dialect.reads_data_only:
            decode = partial(read_with_loss, decode, weights_of(part_input))
        return TrainingPart(
            runtime.lifecycle.make_future(),
            encoded.endpoint,
            "Forward" if self._forward_only else "ForwardBackward",
            encoded.with_number,
            partial(
                read_settled,
                decode,
                ExpectedOutputs.of(chunk.data, whole=not dialect.reads_data_only),
                settle,
            ),
            settle=settle,
            size=chunk.size_bytes,
            content_type=encoded.content_type,
            headers=encoded.headers,
            deadline_at=self.deadline_at,
            made_at=runtime.clock.now(),
        )


def _tokens(data: Sequence[Datum]) -> int:
    lengths = ((datum.model_input, datum.model_input.known_length()) for datum in data)
    return sum(length_of(tokens) if length is None else length for tokens, length in lengths)
