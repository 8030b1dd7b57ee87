"""`SampleLine`: the parts that the samples of one client share: the sampler, the numbers, the body encoder.

The JSON bodies of the samples differ in prompt and number. `SampleBodies` encodes their other fields once.

Any thread may call the methods. Samples are held until the sampler exists; then they are scheduled in the
order of the calls.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.numbers import numbers
from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.held_calls import HeldCalls
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.runtime.sample import SampleJob
from tinker_sync.types._structured import field_names
from tinker_sync.types.model_input import EncodedTextChunk, ModelInput
from tinker_sync.types.sampling import SampleRequest, SamplingParams
from tinker_sync.types.session import JoinSamplingSessionRequest
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import json_body
from tinker_sync.wire.dialect import Dialect

if TYPE_CHECKING:
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.server import Machinery
    from tinker_sync.types.sampling import SampleRequest, SampleResponse

# A token id that marks the place of the tokens in an encoded request. No other field contains it, except
# perhaps a stop text, which `_learn` notices.
_MARK: Final = 1_999_999_999
_MARKED: Final = b"[%d]" % _MARK
_PARAMS: Final = "sampling_params"
_key_of: Final = attrgetter(
    *(name for name in field_names(SampleRequest) if name not in ("prompt", _PARAMS, "seq_id")),
    *(f"{_PARAMS}.{name}" for name in field_names(SamplingParams) if name != "stop"),
)


class SampleBodies:
    """An encoder of the JSON bodies of one client's samples. Thread-safe.

    For a prompt that is a single `EncodedTextChunk`, it encodes the fields other than the number and the
    tokens once, and reuses them while they stay the same. It encodes other requests whole.

    >>> params = SamplingParams(max_tokens=4)
    >>> request = SampleRequest(prompt=ModelInput.from_ints([1, 2]), sampling_params=params)
    >>> bodies = SampleBodies(Dialect.of_vendor())
    >>> bodies.encode(request, 0) == bodies.encode(request, 0), bodies.encode(request, 7)[:12]
    (True, b'{"seq_id":7,')

    Args:
        dialect: the dialect of the server.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        # The fields of the last request, and its text before and after the tokens; replaced as a whole.
        self._last: tuple[Any, bytes, bytes] = (None, b"", b"")

    def encode(self, request: SampleRequest, number: int) -> bytes:
        """Return the JSON body of a request with its sample number.

        The caller has already adapted the request to the dialect.
        """
        chunks = request.prompt.chunks
        if len(chunks) != 1 or type(chunks[0]) is not EncodedTextChunk or request.target_prompt_logprobs:
            return self._encode_whole(request, number)
        stop = request.sampling_params.stop
        key = _key_of(request), tuple(stop) if type(stop) is list else stop
        last: tuple[Any, bytes, bytes] | None = self._last
        if self._last[0] != key:
            last = self._learn(request, key)
        if last is None:
            return self._encode_whole(request, number)
        listed = chunks[0].listed()
        return b'{"seq_id":%d,%b%b%b' % (number, last[1], wire_json.DEFAULT.write(listed), last[2])

    def _learn(self, request: SampleRequest, key: Any) -> tuple[Any, bytes, bytes] | None:
        """Keep and return the encoded text before and after the tokens of a request.

        Return None if the place of the tokens in the text is ambiguous.
        """
        marked = request.model_copy(update={"prompt": ModelInput.from_ints([_MARK])})
        before, *others = self._body(marked)[1:].split(_MARKED)
        if len(others) != 1:
            return None
        last = self._last = key, before, others[0]
        return last

    def _encode_whole(self, request: SampleRequest, number: int) -> bytes:
        return wire_json.with_number(self._body(request), number)

    def _body(self, request: SampleRequest) -> bytes:
        return json_body(request, self._dialect)


CLONE_BLOCK: Final = 10**9
"""The size of a block of numbers. Each copy of a client numbers its samples in a block of its own."""
_JOIN_S: Final = 300.0


class SampleLine:
    """The samples of one client: held until the sampler exists, then scheduled. Thread-safe.

    Args:
        runtime: the parts that the clients of a service share.
        max_attempts: the most tries of one submit.
        copied: True for a copy, a client made from the id of an existing sampler. Other copies may be in use,
            so each numbers its samples from a separate block.
    """

    def __init__(self, runtime: ClientRuntime, max_attempts: int, *, copied: bool = False) -> None:
        self.runtime = runtime
        self.max_attempts = max_attempts
        self.held = HeldCalls()
        self.sampling_session_id = ""
        """The id of the sampler; empty until the sampler exists. Set once."""
        self.run_id = ""
        """The training run of the weights; empty if it is not known. Set once."""
        self.base_model: str | None = None
        """The base model; None if it is not known. Set once."""
        # The original counts from 0 without asking the server. A copy first needs a block of its own.
        self.numbers: Lazy[Callable[[], int]] = Lazy()
        """The function that draws numbers, once it is known. A copy may have to ask the server."""
        if not copied:
            self.numbers.get(lambda: numbers().__next__)
        self.parts: Lazy[tuple[SampleBodies, Callable[..., Any]]] = Lazy()
        """The encoder of the bodies and the function that polls for results, once `make_parts` was called."""
        self._clone_id = 0
        self._held_until_s = -math.inf
        self._aside: deque[SampleJob] = deque()
        _fork.renew_in_child(self)

    def submit(
        self, request: SampleRequest, deadline_at: float, *, may_forbid_retries: bool = False
    ) -> APIFuture[SampleResponse]:
        """Schedule a sample, or hold it until the sampler exists. Return its future at once.

        Args:
            request: the sample; a client that is not ready adds the sampler later.
            deadline_at: the time of the clock at which to give up.
            may_forbid_retries: obey a server whose settings forbid to submit a forgotten sample again.

        Raises:
            InvalidInputError: the request cannot be sent; nothing was sent.
            TinkerError: the client is closed; or, if the sampler exists, the server does not support the
                request or a budget refuses it.
        """
        job = SampleJob(self, request, deadline_at, may_forbid_retries=may_forbid_retries)
        self.runtime.lifecycle.refuse_if_leaving()
        if self.held.open:
            return job.put()
        job.limiters = self.runtime.spending.limiters
        future = job.make_future()
        if not self.held.hold(job):
            try:
                self.runtime.pools.enter.run_call(self.held.release)
            except TinkerError as failure:
                job.fail(failure)  # so that no later call starts it
                raise
        return future

    def hold_back(self, pause_s: float) -> None:
        """Send no sample for some seconds, because the server has no capacity for the model."""
        clock = self.runtime.clock
        self._held_until_s = clock.now() + clock.shorten(pause_s)

    def set_aside(self, job: SampleJob) -> bool:
        """Keep a sample until its model has capacity, and return True; return False if it may have it now.

        The one thread that admits samples calls this, so that those of other models can go meanwhile.
        """
        if self._held_until_s <= self.runtime.clock.now():
            return False
        self._aside.append(job)
        if len(self._aside) == 1:
            self._wait_for_capacity()
        return True

    def _wait_for_capacity(self) -> None:
        left_s = self._held_until_s - self.runtime.clock.now()
        if left_s > 0:
            self.runtime.poller.after(left_s, self._wait_for_capacity)
            return
        while self._aside:
            self._aside.popleft().queue_again()

    def make_numbers(self) -> None:
        """Prepare the sample numbers. The first call in a copy of a client may block to ask the server.

        Raises:
            TinkerError: the server cannot be asked, or has dropped the session.
        """
        self.numbers.get(self._join)
        self.runtime.server.ready()

    def next_number(self) -> int:
        """Return the number of the next sample. The first call in a copy of a client may ask the server.

        Raises:
            TinkerError: the server cannot be asked, or has dropped the session.
        """
        return self.numbers.get(self._join)()

    def make_parts(self, machinery: Machinery) -> tuple[SampleBodies, Callable[..., Any]]:
        """Return the encoder of the bodies and the function that polls for results.

        A copy of a client must have its sample numbers before this call.
        """
        return self.parts.get(lambda: (SampleBodies(machinery.facts.dialect), self._choose_poll(machinery)))

    def number_as_copy(self) -> None:
        """Number the samples from a separate block from now on, as a copy of a client does."""
        self.numbers = Lazy()

    def renew_after_fork(self) -> None:
        """Forget the numbers in a forked child, which needs its own block, as a copy of a client does."""
        self.number_as_copy()
        self.parts = Lazy()
        self._aside = deque()

    def _choose_poll(self, machinery: Machinery) -> Callable[..., Any]:
        """Return the function that polls for results: `Polls.fetch` or `SessionPoll.fetch`.

        `SessionPoll` has one poll for all samples. The server's settings decide.
        """
        if not machinery.facts.config.sample_use_retrieve_futures:
            return machinery.polls.fetch
        from tinker_sync.runtime.session_poll import SessionPoll

        poll = SessionPoll(
            machinery.polls, self.sampling_session_id, self._clone_id, clock=self.runtime.clock
        )
        self.runtime.lifecycle.register_last_call(poll)
        return poll.fetch

    def _join(self) -> Callable[[], int]:
        """Return a function that draws numbers from a block for this copy of the client. May block.

        The server assigns the block, if it lets copies join a sampler. Otherwise the block is random.
        """
        runtime = self.runtime
        if runtime.server.ready().facts.config.sample_join_sampling_session:
            joined = runtime.server.call(
                "join_sampling_session",
                JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id),
                usual_s=_JOIN_S,
            )
            clone = joined.client_counter
        else:
            clone = uuid.uuid4().int % CLONE_BLOCK + 1
        self._clone_id = clone
        return numbers(clone * CLONE_BLOCK).__next__
