"""`ByteBudget`: a limit on the bytes under way. Also the sizes of requests and results, and the split into
chunks.

Sizes are the estimates to which the server's limits on chunks refer. They are computed from the contents of a
datum or a prompt, without encoding it. Field names, provenance spans and framing do not count.

The rule is that of the reference client, the vendor's own. A budget has a balance, which is its limit at
first. A request may enter while the balance is not negative. Entering takes the size of the request off the
balance, leaving puts it back. The balance may become negative. So a request larger than the whole budget may
enter too, and then keeps all others out until it leaves.

The check and the deduction are one step under one lock. Requests that cannot enter wait in a line. A request
that leaves lets them in, in order of arrival, and takes their sizes off the balance at once. So a thread that
is let in need not compete for its bytes, and a stream of small requests cannot starve a large one. For this,
each thread waits for its own event and not for a shared Condition. The clock of the budget does the waiting.

Threads: any. Workers that must not block use `try_acquire` or `when_free`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import InvalidInputError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.transport.call import ANSWER_BYTES
from tinker_sync.types.model_input import (
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)

if TYPE_CHECKING:
    from tinker_sync.types.datum import Datum
    from tinker_sync.types.sampling import SampleRequest

# A token is an int32 in training requests, and decimal text in sampling requests.
_TRAINING_TOKEN_BYTES: Final = 4
_SAMPLING_TOKEN_BYTES: Final = 10


# A token or a log-probability takes some 30 bytes as JSON.
_RESULT_TOKEN_BYTES: Final = 100
# A pass gives a few numbers for each token. In a request the token takes 12 bytes and more.
_RESULT_FACTOR: Final = 64
# The length of a sample to which the request sets no limit.
_LONGEST_SAMPLE: Final = 1_000_000


class DataChunk(NamedTuple):
    """A chunk of a pass: the data of one request, in the order of the call, and their estimated size."""

    data: Sequence[Datum]
    size_bytes: int


def estimate_bytes(datum: Datum) -> int:
    """Return the estimated size of a datum in a training request.

    >>> from tinker_sync.types import Datum
    >>> datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]})
    >>> estimate_bytes(datum)  # 3 tokens of 4 bytes, 3 targets of 8, 3 weights of 4
    48
    """
    size_bytes = 0
    for chunk in datum.model_input.chunks:
        size_bytes += _chunk_bytes(chunk, _TRAINING_TOKEN_BYTES)
    for tensor in datum.loss_fn_inputs.values():
        size_bytes += tensor._numpy.nbytes if tensor._crow is None else tensor.nbytes
    return size_bytes


def estimate_prompt_bytes(prompt: ModelInput) -> int:
    """Return the estimated size of a prompt in a sampling request. A text token counts as 10 bytes.

    >>> estimate_prompt_bytes(ModelInput.from_ints([1, 2, 3]))
    30
    """
    size_bytes = 0
    for chunk in prompt.chunks:
        size_bytes += _chunk_bytes(chunk, _SAMPLING_TOKEN_BYTES)
    return size_bytes


def _chunk_bytes(chunk: ModelInputChunk, token_bytes: int) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return token_bytes * chunk.length
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    if isinstance(chunk, DmelChunk):
        return len(chunk.dmel)
    return len(chunk.location)


def split(data: Sequence[Datum], *, max_bytes: int, max_count: int) -> list[DataChunk]:
    """Split data into chunks of at most `max_bytes` (estimated) and `max_count` data each, in order.

    A datum larger than `max_bytes` gets a chunk of its own.

    Raises:
        InvalidInputError: there is no data.

    >>> from tinker_sync.types import Datum
    >>> datum = Datum(ModelInput.from_ints([1, 2]))
    >>> [len(chunk.data) for chunk in split([datum] * 5, max_bytes=1000, max_count=2)]
    [2, 2, 1]
    """
    if not data:
        raise InvalidInputError("data: expected at least one datum, got none")
    chunks = []
    begin = size_bytes = 0
    for index, datum in enumerate(data):
        datum_bytes = estimate_bytes(datum)
        count = index - begin
        if count and (size_bytes + datum_bytes > max_bytes or count >= max_count):
            chunks.append(DataChunk(data[begin:index], size_bytes))
            begin, size_bytes = index, 0
        size_bytes += datum_bytes
    chunks.append(DataChunk(data[begin:], size_bytes))
    return chunks


def most_sample_bytes(request: SampleRequest, prompt_bytes: int) -> int:
    """Return a size that no result of a sampling request exceeds.

    >>> from tinker_sync.types import SampleRequest, SamplingParams
    >>> prompt, settings = ModelInput.from_ints([1]), SamplingParams(max_tokens=5)
    >>> most_sample_bytes(SampleRequest(prompt=prompt, sampling_params=settings), 10) // 2**20
    8
    """
    longest = request.sampling_params.max_tokens
    sampled = request.num_samples * (_LONGEST_SAMPLE if longest is None else longest)
    most_bytes = ANSWER_BYTES + sampled * _RESULT_TOKEN_BYTES * (1 + request.topk_sample_logprobs)
    scores = 1 + request.topk_prompt_logprobs + request.prompt_alt_tokens_k
    most_bytes += prompt_bytes // _SAMPLING_TOKEN_BYTES * _RESULT_TOKEN_BYTES * scores
    if request.target_prompt_logprobs is not None:
        most_bytes += request.target_prompt_logprobs.nbytes * _RESULT_FACTOR
    return most_bytes


def most_pass_bytes(chunk_bytes: int) -> int:
    """Return a size that no result of a chunk exceeds; of other training calls, `chunk_bytes` is 0.

    >>> most_pass_bytes(0) // 2**20
    8
    """
    return ANSWER_BYTES + chunk_bytes * _RESULT_FACTOR


class _PlaceInLine:
    """The place of a waiting request in the line of a budget.

    `granted` is True once the request has its bytes; the lock of the budget guards it.
    """

    __slots__ = ("granted", "size_bytes", "wake")

    def __init__(self, size_bytes: int, wake: Callable[[bool], object]) -> None:
        self.size_bytes = size_bytes
        self.wake = wake  # called once: with True when the request enters, with False when the budget closes
        self.granted = False


class ByteBudget:
    """A limit on the bytes under way, first come first served. Thread-safe.

    A request may enter unless those under way exceed `limit_bytes`. It may itself exceed the limit.

    >>> budget = ByteBudget(100)
    >>> budget.try_acquire(70), budget.try_acquire(70), budget.try_acquire(1)
    (True, True, False)
    >>> budget.release(70)
    >>> budget
    <ByteBudget 30 of 100 bytes free, 0 in line>
    """

    def __init__(self, limit_bytes: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.limit_bytes = limit_bytes
        """The size of the whole budget."""
        self._lock = threading.Lock()
        self._balance_bytes = limit_bytes  # guarded by _lock
        self._line: deque[_PlaceInLine] = deque()  # guarded by _lock; empty while the balance is not negative
        self._failure: Exception | None = None  # guarded by _lock; set once, final
        _fork.renew_in_child(self)

    def try_acquire(self, size_bytes: int, turn: _PlaceInLine | None = None) -> bool:
        """Take `size_bytes` from the budget and return True, or return False if there is no room now.

        Args:
            size_bytes: the size of the request.
            turn: the place to put in line if there is no room; only methods of this class pass it.

        Raises:
            Exception: the budget is closed; a copy of the failure given to `close`.

        >>> ByteBudget(10).try_acquire(4)
        True
        """
        assert size_bytes >= 0  # noqa: S101
        with self._lock:
            failure = self._failure
            entered = failure is None and self._balance_bytes >= 0
            if entered:
                self._balance_bytes -= size_bytes
            elif turn is not None and failure is None:
                self._line.append(turn)
        if failure is not None:
            raise copy_exception(failure)
        return entered

    @property
    def has_room(self) -> bool:
        """True if a request can probably enter now.

        The value may be outdated, because the read takes no lock.

        >>> ByteBudget(10).has_room
        True
        """
        return self._balance_bytes >= 0

    def acquire(self, size_bytes: int, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for room, take `size_bytes` from the budget, and return True.

        Return False if there is no room in time. Without `timeout`, wait without a limit.

        Raises:
            Exception: the budget is closed, now or during the wait; a copy of the failure given to `close`.

        >>> ByteBudget(10).acquire(4, timeout=1)
        True
        """
        if self.try_acquire(size_bytes):
            return True
        arrived = threading.Event()
        turn = _PlaceInLine(size_bytes, lambda _: arrived.set())
        if self.try_acquire(size_bytes, turn):
            return True
        try:
            self._clock.wait(arrived, math.inf if timeout is None else timeout)
        except BaseException:
            if self._leave_line(turn):
                self.release(size_bytes)
            raise
        granted = self._leave_line(turn)
        if not granted and (failure := self._failure) is not None:
            raise copy_exception(failure)
        return granted

    def when_free(self, size_bytes: int, then: Callable[[bool], object]) -> None:
        """Take `size_bytes` and call `then(True)`, or call `then(False)` if the budget closes first.

        If there is room, this method calls `then` itself. Otherwise it returns, and the thread that makes
        room or closes the budget calls `then`. This method is for threads that must not wait, such as the
        workers whose results make room. `then` must be short.

        Raises:
            Exception: the budget is closed already; a copy of the failure given to `close`.

        >>> budget = ByteBudget(0)
        >>> for name in "ab":
        ...     budget.when_free(5, lambda granted, name=name: print(name, granted))
        a True
        >>> budget.release(5)
        b True
        """
        if self.try_acquire(size_bytes, _PlaceInLine(size_bytes, then)):
            then(True)

    def release(self, size_bytes: int) -> None:
        """Give `size_bytes` back to the budget, and let in the next requests in line.

        >>> budget = ByteBudget(10)
        >>> budget.acquire(4)
        True
        >>> budget.release(4)
        """
        admitted: list[_PlaceInLine] = []
        with self._lock:
            self._balance_bytes += size_bytes
            overfull = self._balance_bytes > self.limit_bytes
            while self._line and self._balance_bytes >= 0:
                turn = self._line.popleft()
                self._balance_bytes -= turn.size_bytes
                turn.granted = True
                admitted.append(turn)
        for turn in admitted:
            turn.wake(True)
        assert not overfull, "more came back than was taken"  # noqa: S101

    def close(self, failure: Exception) -> None:
        """Close the budget: threads that wait in `acquire`, and later requests, fail with `failure`.

        Functions that wait in `when_free` are called with False. Bytes can still be put back. If the budget
        is closed already, the first failure stays.

        >>> budget = ByteBudget(10)
        >>> budget.close(RuntimeError("closed"))
        >>> budget.acquire(1)
        Traceback (most recent call last):
            ...
        RuntimeError: closed
        """
        with self._lock:
            if self._failure is None:
                self._failure = failure
            sent_away, self._line = self._line, deque()
        for turn in sent_away:
            turn.wake(False)

    def renew_after_fork(self) -> None:
        """Forget the requests of the parent, under way or in line; they do not count in the child."""
        self._lock = threading.Lock()
        self._balance_bytes = self.limit_bytes
        self._line = deque()

    def __repr__(self) -> str:
        with self._lock:
            closed = ", closed" if self._failure is not None else ""
            free = f"{self._balance_bytes} of {self.limit_bytes} bytes free"
            return f"<ByteBudget {free}, {len(self._line)} in line{closed}>"

    def _leave_line(self, turn: _PlaceInLine) -> bool:
        """Remove a request from the line, if it is there. Return True if it has already got its bytes."""
        with self._lock:
            if turn in self._line:
                self._line.remove(turn)
            return turn.granted
