"""`SampleLine`: the parts that the samples of one client share: the sampler, the numbers, the body encoder.

Any thread may call the methods. Samples are held until the sampler exists; then they are scheduled in the
order of the calls.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.runtime import _fork
from tinker_sync.runtime.held_calls import HeldCalls
from tinker_sync.runtime.once import Once
from tinker_sync.runtime.sample import SampleJob
from tinker_sync.types.sampler import JoinSamplingSessionRequest
from tinker_sync.wire.sample_bodies import SampleBodies

if TYPE_CHECKING:
    from tinker_sync.runtime.core import Core
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.server import Machinery
    from tinker_sync.types.sampling import SampleRequest, SampleResponse

CLONE_BLOCK: Final = 10**9
"""The size of a block of numbers. Each copy of a client numbers its samples in a block of its own."""
_JOIN_S: Final = 300.0


class SampleLine:
    """The samples of one client: held until the sampler exists, then scheduled. Thread-safe.

    Args:
        core: the shared parts.
        max_attempts: the most tries of one submit.
        copied: True if other copies of the client may be in use; the numbers then come from a separate block.
    """

    def __init__(self, core: Core, max_attempts: int, *, copied: bool = False) -> None:
        self.core = core
        self.max_attempts = max_attempts
        self.held = HeldCalls()
        self.sampling_session_id = ""
        """The id of the sampler; empty until the sampler exists. Set once."""
        self.run_id = ""
        """The training run of the weights; empty if it is not known. Set once."""
        self.base_model: str | None = None
        """The base model; None if it is not known. Set once."""
        # The original counts from 0 without asking the server. A copy first needs a block of its own.
        self._numbers: Once[Callable[[], int]] = Once()
        if not copied:
            self._numbers.get(lambda: itertools.count().__next__)
        self._parts: Once[tuple[SampleBodies, Callable[..., Any]]] = Once()
        self._clone_id = 0
        _fork.renew_in_child(self)

    def submit(
        self, request: SampleRequest, deadline_at: float, *, may_forbid_retries: bool = False
    ) -> APIFuture[SampleResponse]:
        """Schedule a sample, or hold it. Return its future at once.

        Args:
            request: the sample; a client that is not ready adds the sampler later.
            deadline_at: the time of the clock at which to give up.
            may_forbid_retries: obey a server that wants each sample submitted under one number only.

        Raises:
            InvalidInputError: the request cannot be sent; nothing was sent.
            TinkerError: the server does not support the request, or the client is closed.
        """
        job = SampleJob(self, request, deadline_at, may_forbid_retries=may_forbid_retries)
        self.core.refuse_closed()
        if self.held.open:
            return job.put()
        job.limiters = self.core.admission.limiters
        future = job.make_future()
        if not self.held.hold(job):
            job.start()
        return future

    def make_numbers(self) -> None:
        """Prepare the numbers. The first call of a copy asks the server and blocks."""
        self._numbers.get(self._join)
        self.core.ready()

    @property
    def numbered(self) -> bool:
        """Return True if the numbers are known."""
        return self._numbers.made is not None

    def next_number(self) -> int:
        """Return the number for the next sample. The first call of a copy asks the server."""
        draw = self._numbers.made or self._numbers.get(self._join)
        return draw()

    def parts(self, machinery: Machinery) -> tuple[SampleBodies, Callable[..., Any]]:
        """Return the encoder of the bodies and the function that polls for results.

        A copy must have its numbers before this call.
        """
        return self._parts.made or self._parts.get(
            lambda: (SampleBodies(machinery.facts.dialect), self._choose_poll(machinery))
        )

    def renew_after_fork(self) -> None:
        """Begin as a copy: a forked child needs numbers of its own."""
        self._numbers = Once()
        self._parts = Once()

    def _choose_poll(self, machinery: Machinery) -> Callable[..., Any]:
        """Return the function that polls for results: together if the server offers that, else one by one."""
        if not machinery.facts.config.sample_use_retrieve_futures:
            return machinery.fetcher.fetch
        from tinker_sync.runtime.session_poll import SessionPoll

        poll = SessionPoll(machinery.fetcher, self.sampling_session_id, self._clone_id, clock=self.core.clock)
        self.core.owe(poll)
        return poll.fetch

    def _join(self) -> Callable[[], int]:
        """Return a function that draws numbers from a block that no other copy uses."""
        core = self.core
        if core.ready().facts.config.sample_join_sampling_session:
            joined = core.call(
                "join_sampling_session",
                JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id),
                usual_s=_JOIN_S,
            )
            clone = joined.client_counter
        else:
            clone = uuid.uuid4().int % CLONE_BLOCK + 1
        self._clone_id = clone
        return itertools.count(clone * CLONE_BLOCK).__next__
