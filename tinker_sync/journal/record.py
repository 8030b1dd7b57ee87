"""`TrainingRecord`: it decides for each call of a training client if the call is sent, and records it.

A training client looks up each request in its record.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from tinker_sync._base.api_errors import status_error_class
from tinker_sync.errors import (
    APIStatusError,
    InvalidInputError,
    JournalError,
    RequestFailedError,
    TinkerError,
)
from tinker_sync.journal.file import ModelHistory, Sent
from tinker_sync.journal.requests import digest_of, replaced_by, sampler_of, with_sampler

if TYPE_CHECKING:
    from tinker_sync.journal.run import RunJournal

_log: Final = logging.getLogger("tinker_sync.journal")

Ended = Callable[["BaseException | None"], object]


class RecordedPart(Protocol):
    """A request of a training call, as far as a `TrainingRecord` uses it."""

    future: Any
    endpoint: str
    step: int | None
    behind: int | None
    decode: Any
    known: str | None
    """The request id from an earlier run, if any; the request is then not sent again."""
    number: int | None
    """The number of the request in the journal; None until it is fixed."""

    def bytes_for(self, number: int) -> Any: ...

    def keep(self, body: Any) -> None:
        """Keep the body for the sender of the request."""


class TrainingRecord:
    """The requests of one training client in a journal, from the earlier run and from this one.

    The threads that send requests or take results write lines; the thread of the user sets the step.

    Args:
        journal: the journal to write to.
        model_seq_id: the number of the model in its session.
    """

    def __init__(self, journal: RunJournal, model_seq_id: int) -> None:
        self._journal = journal
        self.model_seq_id = model_seq_id
        self._history = ModelHistory()
        self._shift = 0
        self._last_step: int | None = None
        self._resumed: int | None = None
        self._before = 0
        """The sequence number of the last request before the step that is resumed."""
        self._stepped: int | None = None
        """The step of the last `optim_step`."""
        self.checkpoint: tuple[str, int] | None = None
        """The last checkpoint of a step, and the step to continue with after it; None without one."""
        self.after: int | None = None
        """The number of the model that this one replaces; None if it replaces none."""
        self.step: int | None = None
        """The current step of the user's loop; None before the loop."""
        self.complete = False
        """True once the loop has had all its steps."""
        self._behind: int | None = None
        """The `stop` of the last loop, if it has ended; None within a loop and before the first."""
        self.early: weakref.WeakSet[Any] = weakref.WeakSet()
        """The futures of calls before the first step, as long as the runtime or the user holds them."""
        self._replacing: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The futures of saves that replace a checkpoint, by their numbers."""
        self.settled: tuple[str, ...] = ()
        """A text for each request that `settle` has recorded, with its fate."""

    # -------------------------------------------------------------------------------------- the model

    def replace(self, other: TrainingRecord, path: str) -> None:
        """Take note that this model replaces another one, and that it is restored from `path`.

        If `path` is the last checkpoint of a step of the other model, `steps` begins after that step.

        Raises:
            JournalError: a later save without an answer may have replaced that checkpoint.
        """
        for number, future in list(other._replacing.items()):  # one that has just ended may not be noted yet
            if number in other._history.sent:
                _note_failure(other._history.sent[number], future)
        other._history.refuse_replaced(path)
        self.after = other.model_seq_id
        if other.checkpoint is not None and other.checkpoint[0] == path:
            self._history = ModelHistory(start=other.checkpoint)

    def open(self, digest: str | None) -> ModelHistory:
        """Open the record when the session is known. Return the history to continue with.

        Args:
            digest: the digest of the request for the model; None for `attach`, which repeats no request.

        Raises:
            JournalError: the journal has a model with other arguments under this number, or the session is
                lost and a save without an answer may have replaced its only checkpoint.
        """
        history = self._journal.history_of(self.model_seq_id)
        if self._journal.replays and history.digest not in (None, digest):
            raise JournalError(
                f"model {self.model_seq_id} of the journal was made with other arguments; "
                "use the arguments of before, or another journal"
            )
        if self.after is not None:
            pass  # `replace` has set the history
        elif self._journal.resumed:
            self._history = history
            if history.model_id is None:
                lost = self._journal.latest_of(self.model_seq_id)
                lost.refuse_doubtful()
                self._tell_repeated(lost)
        else:
            latest = self._journal.latest_of(self.model_seq_id)
            latest.refuse_doubtful()
            self.model_seq_id = self._journal.origin_of(self.model_seq_id)
            digest = self._journal.history_of(self.model_seq_id).digest
            self._history = ModelHistory(digest, start=latest.checkpoint)
            self._tell_repeated(latest)
        self.checkpoint = self._history.checkpoint
        self._resumed = self._history.last_step
        # The smallest recorded number of the step may be too large: a group's first request is sent last. A
        # program that attached may have sent later requests, which belong to no step.
        sent = self._history.sent.values()
        first = min((one.number for one in sent if one.step == self._resumed), default=0)
        self._before = max((one.number for one in sent if one.number < first), default=0)
        self._shift = self._history.made_with
        if not self._journal.replays:
            self._shift = max(self._history.sent, default=0)
        return self._history

    def note_model(self, model_id: str, request_id: str, digest: str) -> None:
        """Record a new model, and the request that made it.

        Raises:
            JournalError: the model cannot be recorded.
        """
        line: dict[str, Any] = {
            "of": self.model_seq_id,
            "model": model_id,
            "id": request_id,
            "digest": digest,
        }
        if self._history.start is not None:
            line["start"] = self._history.start
        if self.after is not None:
            line["after"] = self.after
        self._journal.write(line, sync=True)

    def _tell_repeated(self, history: ModelHistory) -> None:
        last, start = history.last_step, self._history.start
        if start is not None:
            again = (
                f"steps {start[1]} to {last} are repeated" if last is not None and last >= start[1] else ""
            )
            _log.warning(
                "model %d is restored from %s; %s", self.model_seq_id, start[0], again or "nothing is lost"
            )
        elif history.sent:
            _log.warning("model %d begins anew: the journal knows no checkpoint of it", self.model_seq_id)

    # -------------------------------------------------------------------------------------- without a script

    @property
    def unread(self) -> list[Sent]:
        """The accepted requests whose results have not arrived, by ascending number."""
        return self._history.unread

    def unsettled(self) -> list[int]:
        """Return the ascending numbers of requests that may not have reached the server."""
        sent = self._history.sent
        known = {number for number, one in sent.items() if one.request_id is not None}
        return [number for number in range(1, max(sent, default=0) + 1) if number not in known]

    def settle(self, number: int, *, arrived: bool) -> None:
        """Record and log the fate of an unsettled request: it has reached the server, or it has not.

        Args:
            number: its sequence number.
            arrived: True if the server has received it.

        Raises:
            JournalError: the fate cannot be recorded.
        """
        sent = self._history.sent.pop(number, None)
        call = "a request" if sent is None else sent.call
        fate = "had reached the server; its result is lost" if arrived else "had not reached the server"
        self.settled += (f"{call} (number {number}) {fate}",)
        _log.warning("%s", self.settled[-1])
        self._journal.write({"of": self.model_seq_id, "settled": number})

    def follow(self, sent: Sent, future: Any) -> None:
        """When `future` ends with a result, record that the result of the request has arrived."""
        future._when_done(lambda ended: self._note_result(sent, ended))

    def refuse_in_fork(self) -> None:
        """Raise a JournalError in a forked child; see `JournalFile.refuse_in_fork`."""
        self._journal.refuse_in_fork()

    # -------------------------------------------------------------------------------------- steps

    def mark(self, call: Any, parts: Iterable[RecordedPart]) -> None:
        """Give the requests of a call its step, also those behind a complete loop.

        A call before the first step has none. Its future is kept in the set `early`, so that `steps` can wait
        for such calls.
        """
        for part in parts:
            part.step, part.behind = call.step, self._behind
        if call.step is None:
            self.early.add(call.future)

    def next_step(self, next_number: int, stop: int) -> int:
        """Return the step with which a loop up to step `stop` begins.

        If the earlier run ended in this step, the calls of the step get the numbers that they had then. If it
        ended in a later loop, the calls behind this one do. After a loop that was left, the next one goes on
        in its last step; after a complete loop, with the step behind it.

        Args:
            next_number: the number that the next call would have without the journal.
            stop: the number behind the last step.

        Raises:
            InvalidInputError: complete loops have had all steps up to `stop`.
        """
        if self.step is not None:
            if self.complete and self.step + 1 >= stop:
                raise InvalidInputError(
                    f"steps: steps 0 to {self.step} are done, and with a journal each step counts once; make "
                    "one loop over the steps of all epochs"
                )
            return self.step + self.complete
        if self._resumed is None:
            return self._history.start[1] if self._history.start is not None else 0
        sent = list(self._history.sent.values())  # another thread may note the result of an early call
        behind = (one.number for one in sent if one.behind == stop <= self._resumed)
        self._shift = min(behind, default=self._before + 1) - next_number
        return self._resumed

    def begin_step(self, step: int) -> None:
        """Give the calls from now on this step."""
        self.step, self.complete, self._behind = step, False, None

    def end_loop(self, stop: int) -> None:
        """Take note that a loop up to step `stop` has had its last step, in this run or an earlier one."""
        self.complete, self._behind = self.step is not None, stop

    # -------------------------------------------------------------------------------------- requests

    def around(
        self, send: Callable[[Any, int, Ended], object], not_taken: type[Exception]
    ) -> Callable[[Any, int, Ended], None]:
        """Return a function like `send` that records each request and does not repeat accepted ones.

        Args:
            send: sends a request under a number, or fetches the result of a known request. When the sending
                has ended, it calls its last argument, with None if the server accepted the request, else with
                the failure.
            not_taken: the failure of a request that the server certainly does not have. The returned function
                raises it for a request that the server refused in an earlier run, if the script then sent
                another one under its number.

        After a failure that leaves open if the server has the request, nothing is recorded.

        The returned function raises `JournalError` if the journal has another request under the number, or
        cannot be written.
        """

        def recorded(part: RecordedPart, number: int, ended: Ended) -> None:
            # `sent_before` has fixed the number, except that of a request without effect.
            number = part.number = part.number or number + self._shift
            body = part.bytes_for(number)
            digest = digest_of(part.endpoint, body)
            if self._history.passed_over(number, digest):
                raise not_taken from _refusal(part.endpoint, self._history.refused[number, digest])
            known = self._look_up(part, number, digest, body)
            self._note_step(known)
            part.keep(body if known.sampler is None else with_sampler(body, known.sampler))
            part.known = known.request_id
            if known.resumes_at is not None:
                part.decode = partial(self._read_checkpoint, known, part.decode)
            if known.replaces is not None:
                self._replacing[number] = part.future
            self.follow(known, part.future)

            def note_end(failure: BaseException | None) -> None:
                try:
                    if isinstance(failure, not_taken):
                        self._note_refusal(known, failure.__cause__)
                    elif failure is None and known.request_id is None:
                        known.request_id = part.future.request_id
                        self._journal.write({"of": self.model_seq_id, "sent": number, "id": known.request_id})
                except BaseException as unwritten:  # noqa: BLE001  # any failure must end the call
                    failure = unwritten
                ended(failure)

            send(part, number, note_end)

        return recorded

    def sent_before(
        self, parts: Sequence[RecordedPart], first_number: int
    ) -> tuple[list[int], dict[int, BaseException]] | None:
        """Fix the numbers of the requests of a call, which it keeps however often and late it sends them.

        Return which of them the earlier run sent, if the server refused some of them.

        The caller repeats the same requests, because the numbers of the later ones follow from them. Return
        None for a call of which no request was refused, and for one that has only one request.

        Args:
            parts: the requests.
            first_number: the number of the first one; the others follow.
        """
        numbers = range(first_number + self._shift, first_number + self._shift + len(parts))
        for part, number in zip(parts, numbers, strict=True):
            part.number = number
        if len(parts) == 1 or not any(number in numbers for number, _ in self._history.refused):
            return None
        sent: list[int] = []
        refused: dict[int, BaseException] = {}
        for index, (number, part) in enumerate(zip(numbers, parts, strict=True)):
            body = part.bytes_for(number)
            part.keep(body)
            digest, known = digest_of(part.endpoint, body), self._history.sent.get(number)
            if self._history.passed_over(number, digest):
                refused[index] = _refusal(part.endpoint, self._history.refused[number, digest])
            elif known is not None and known.digest == digest:
                sent.append(index)
        return (sent, refused) if refused else None

    def _note_refusal(self, sent: Sent, cause: BaseException | None) -> None:
        """Record that the server refused a request, and with which status."""
        self._history.sent.pop(sent.number, None)
        line: dict[str, Any] = {"of": self.model_seq_id, "refused": sent.number, "digest": sent.digest}
        if isinstance(cause, APIStatusError):
            line["status"] = cause.status_code
        self._journal.write(line)

    def _look_up(self, part: RecordedPart, number: int, digest: str, body: Any) -> Sent:
        # The second pass of a custom loss is sent right after its first pass, and has the same step.
        step = self._last_step = self._last_step if part.step is None else part.step
        known = self._history.sent.get(number)
        if known is not None and known.digest == digest:
            return known
        if known is not None:
            raise JournalError(
                f"{part.endpoint} (number {number}) is not the {known.call} that was sent under this number; "
                "nothing was sent. The script has to make the calls of before, in their order"
            )
        more: dict[str, Any] = {
            "step": step,
            "replaces": replaced_by(part.endpoint, body),
            "sampler": sampler_of(part.endpoint, body),
            "behind": part.behind,
        }
        sent = self._history.sent[number] = Sent(number, part.endpoint, digest, **more)
        line = {"of": self.model_seq_id, "send": number, "call": part.endpoint, "digest": digest}
        self._journal.write({**line, **{name: value for name, value in more.items() if value is not None}})
        return sent

    def _note_step(self, sent: Sent) -> None:
        if sent.call == "optim_step":
            self._stepped = sent.step
        elif sent.call == "save_weights" and sent.step is not None:
            # A checkpoint before the `optim_step` of its step does not contain that step.
            sent.resumes_at = sent.step + (self._stepped == sent.step)

    def _read_checkpoint(self, sent: Sent, read: Callable[..., Any], *answer: Any) -> Any:
        """Read the result of a save, and keep its path and step before the future has the result.

        So `replace` finds the step of a checkpoint whose result was read just before.
        """
        saved = read(*answer)
        assert sent.resumes_at is not None  # noqa: S101  # `around` has checked this
        sent.path, self.checkpoint = saved.path, (saved.path, sent.resumes_at)
        return saved

    def _note_result(self, sent: Sent, future: Any) -> None:
        """Record that a result has arrived, and its path if it is a checkpoint. A failure is no result."""
        _note_failure(sent, future)
        # `exception()` would count as a look of the user, after which a failure is not logged.
        if sent.arrived or future.cancelled() or future.failure is not None:
            return
        sent.arrived = True
        if sent.path is None:  # `replace` looks up saves; no later call of this run gets this number
            self._history.sent.pop(sent.number, None)
        line = {"of": self.model_seq_id, "arrived": sent.number}
        path = getattr(future.result(), "path", None) if sent.call == "save_weights" else None
        try:
            self._journal.write({**line, "path": path} if path else line, sync=path is not None)
        except JournalError as error:
            _log.error("%s", error)


def _note_failure(sent: Sent, future: Any) -> None:
    """Take note that a save has replaced no checkpoint if the server has reported its failure."""
    if isinstance(future.failure, RequestFailedError):
        sent.replaces = None


def _refusal(call: str, status: int | None) -> TinkerError:
    """Return the error for a call that the server refused in an earlier run, of the class it had then."""
    if status is None:  # the server had no part in it, as for a call without a key
        return JournalError(f"{call} failed in an earlier run before the server accepted it; it is not sent")
    return status_error_class(status)(f"the server has refused {call} before", status_code=status)
