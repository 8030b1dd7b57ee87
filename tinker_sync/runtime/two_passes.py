"""A forward pass, work of this process, and a backward pass that depends on it, as one call.

The work is a `Between`, such as a custom loss (`tinker_sync.losses.custom`). `forward_backward_custom` makes
both passes; `forward_custom` makes no backward pass.

Order. The call puts both passes into the send queue together: the forward pass with its requests, and the
backward pass as an entry whose requests are added later. No other entry gets between them. A call
that any thread makes on the same training client during the forward pass or the loss is sent after the
backward pass, with a higher number. So the weights cannot change between the log-probabilities and the
gradients, and a script may call `forward_backward_custom` and `optim_step` without waiting in between.

Failure. If the forward pass or the loss fails, or the call is cancelled before the backward pass is sent,
the backward pass is left out: it uses no number, later entries go on, and the weights do not change. If
it is unknown whether the server has accepted the forward pass, the next call first sends it again, as it
does with any request; the call may be repeated, because a forward pass changes nothing.

Threads. A user's thread makes the call, the passes end on runtime threads, and the loss runs on a worker for
losses. Any thread may use a `TwoPassFuture`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.naming import named
from tinker_sync.errors import DeadlineError, TinkerError
from tinker_sync.runtime.answers import add_mean_loss
from tinker_sync.runtime.futures import APIFuture, ComposedFuture, FutureState, Status, Submit
from tinker_sync.runtime.send_queue import Entry, SendQueue
from tinker_sync.runtime.training import Entries, PassCall, TrainingCall, TrainingLine, TrainingRequest
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput

if TYPE_CHECKING:
    from tinker_sync._base.events import Limiter

T = TypeVar("T")

_COMPUTING: Final = Status(FutureState.WAITING, "the loss is being computed")
_computing = threading.local()  # .queue: the send queue whose loss this thread computes


class TwoPassFuture(ComposedFuture[ForwardBackwardOutput, ForwardBackwardOutput]):
    """The future of a call with a forward pass, a loss, and a backward pass. Thread-safe.

    It can be cancelled until the backward pass is sent. It has the request ids of both passes. Its timeline
    has the sending time of the forward pass and the acceptance time of the backward pass. If it ends early,
    it cancels the passes.

    >>> forward = APIFuture()
    >>> both = TwoPassFuture(forward)
    >>> forward._mark_accepted("req-1")
    >>> both.request_ids, both.status().state
    (('req-1',), <FutureState.WAITING: 'waiting'>)
    """

    def __init__(
        self,
        forward: APIFuture[ForwardBackwardOutput],
        *,
        submit: Submit | None = None,
        soon: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create the future of a call whose forward pass is `forward`. `follow` adds the backward pass."""
        super().__init__(submit=submit, soon=soon, clock=clock)
        self._add(forward)

    def follow(self, backward: APIFuture[ForwardBackwardOutput]) -> None:
        """Add the backward pass, or cancel it if this future has ended."""
        if not self._add(backward):
            backward.cancel()

    def status(self) -> Status:
        """Return the forward pass's status while it runs, then "waiting" or "paused" until the call ends.

        >>> TwoPassFuture(APIFuture()).status().state
        <FutureState.QUEUED: 'queued'>
        """
        passes = self._parts
        if self.done() or not passes:
            return super().status()
        if not passes[0].done():
            return passes[0].status()
        status = passes[-1].status()
        if len(passes) == 1:
            return _COMPUTING
        return status if status.state is FutureState.PAUSED else Status(FutureState.WAITING, status.reason)

    def _moments(
        self, parts: Sequence[APIFuture[ForwardBackwardOutput]]
    ) -> tuple[float | None, float | None]:
        sending, accepted = super()._moments(parts)
        return sending, accepted if len(parts) > 1 else None  # the call is accepted with its backward pass

    def _cancels_parts(self) -> bool:
        return True


def refuse_inside_loss(queue: SendQueue[TrainingRequest]) -> None:
    """Raise TinkerError if a loss calls its own training client, because both would wait for each other."""
    if getattr(_computing, "queue", None) is queue:
        raise TinkerError(
            "a custom loss must not use its own training client: its calls are sent after the backward pass, "
            "which waits for the loss. Compute such values before, and pass them in loss_fn_inputs"
        )


Finish = Callable[[ForwardBackwardOutput], ForwardBackwardOutput]


class Between(Protocol):
    """What a call does between its passes."""

    forward: ForwardBackwardInput
    """The forward pass."""
    trained: int
    """The number of tokens with a weight, for the mean loss."""

    def compute(self, output: ForwardBackwardOutput) -> tuple[ForwardBackwardInput | None, Finish]:
        """Return the backward pass, and the function that makes the result of the call from its output.

        Without a backward pass, that function gets the output of the forward pass. Runs on a worker for
        losses, and may raise any exception, with which the call then fails.
        """


class TwoPassCall(TrainingCall):
    """A call that makes a forward pass, computes a loss, and makes a backward pass.

    Args:
        line: the `TrainingLine` of the client, which has its send queue.
        name: the name of the call, for errors.
        between: the forward pass, and what follows from its output.
        deadline_at: the moment of the clock at which to give up.
        train: False leaves out the backward pass, for `forward_custom`.

    Raises:
        InvalidInputError: the data cannot be sent.
    """

    def __init__(
        self, line: TrainingLine, name: str, between: Between, deadline_at: float, *, train: bool = True
    ) -> None:
        super().__init__(line, name, deadline_at)
        self._train = train
        self._between = between
        self._forward = PassCall(line, "forward", between.forward, deadline_at, forward_only=True)
        self._made_at = line.runtime.clock.now()
        self._both: TwoPassFuture
        self._place: Entry[TrainingRequest]

    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        """Return the future of a call that is made before the model is ready. No request exists yet."""
        return self._follow(self._forward.wait_for_model(limiters))

    def prepare(self) -> Entries:
        """Return the forward pass and, to train, the backward pass, whose requests are added later."""
        (forward,) = self._forward.prepare()
        if self._future is None:
            self._follow(forward.future)
        self._place = Entry("forward_backward", (), self.future, forward.parallel, forward.alone)
        forward.future._when_done(self._forward_ended)
        return [forward, self._place] if self._train else [forward]

    def _follow(self, forward: APIFuture[ForwardBackwardOutput]) -> APIFuture[Any]:
        runtime = self.line.runtime
        self._future = self._both = future = TwoPassFuture(
            forward,
            submit=runtime.pools.callback.run,
            soon=runtime.lifecycle.run_soon,
            clock=runtime.clock,
        )
        # The future fails when the client is closed, also while a loss is being computed.
        # It is no request, so recordings do not follow it.
        lease: APIFuture[Any] = APIFuture(clock=runtime.clock)
        runtime.lifecycle.end_with_client(lease)
        lease._when_done(lambda ended: None if ended.cancelled() else future.fail(ended.exception()))
        future._when_done(lambda _: lease.cancel())
        return future

    def _forward_ended(self, forward: APIFuture[ForwardBackwardOutput]) -> None:
        """Start the loss on a worker, or fail the call if the forward pass has failed."""
        if not self._succeeded(forward):
            return
        try:
            self.line.runtime.pools.loss.run_call(partial(self._compute, forward.result(timeout=0)))
        except TinkerError as error:  # the client is closed, or no thread can start
            self._both.fail(error)

    def _succeeded(self, one: APIFuture[ForwardBackwardOutput]) -> bool:
        failure = CancelledError() if one.cancelled() else one.exception()
        if failure is not None:
            self._both.fail(failure)
        return failure is None

    def _compute(self, output: ForwardBackwardOutput) -> None:
        """Compute the loss, then create the requests of the backward pass, or resolve a call without one.

        Runs on a worker for losses.
        """
        if self._both.done():
            return
        computed, failure = _try(partial(self._compute_between, output))
        if computed is not None:
            whole, finish = computed
            if whole is None:
                self._finish(finish, output)
                return
            backward, failure = _try(partial(self._prepare_backward, whole))
            if backward is not None:
                self._both.follow(backward.future)
                backward.future._when_done(partial(self._backward_ended, finish))
                self.line.queue.fill(self._place, backward.requests)
                return
        assert failure is not None  # noqa: S101
        self._both.fail(failure)

    def _compute_between(self, output: ForwardBackwardOutput) -> tuple[ForwardBackwardInput | None, Finish]:
        _computing.queue = self.line.queue
        try:
            return self._between.compute(output)
        finally:
            _computing.queue = None

    def _prepare_backward(self, whole: ForwardBackwardInput) -> Entry[TrainingRequest]:
        now = self.line.runtime.clock.now()
        if now >= self.deadline_at:
            # If the pass failed while it is sent, its number would be missing, and the server would hold all
            # later operations.
            raise DeadlineError(
                "the loss took too long; its backward pass was not sent",
                waited_s=now - self._made_at,
                last_words="the forward pass had ended",
            )
        with named(self.sdk_method):
            (backward,) = PassCall(self.line, "forward_backward", whole, self.deadline_at).prepare()
        return backward

    def _backward_ended(self, finish: Finish, backward: APIFuture[ForwardBackwardOutput]) -> None:
        if self._succeeded(backward):
            self._finish(finish, backward.result(timeout=0))

    def _finish(self, finish: Finish, output: ForwardBackwardOutput) -> None:
        self._both.resolve(add_mean_loss(finish(output), self._between.trained))


def _try(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return the value of `work()`, or its failure.

    The future that gets the failure is in no frame of the traceback, so no cycle keeps the future alive.
    """
    try:
        return work(), None
    except BaseException as failure:  # noqa: BLE001  # the user's loss may raise anything, and the user gets it
        return None, failure
