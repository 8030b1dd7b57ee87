"""The file of a journal, and the history that its lines describe.

`JournalFile` appends lines of JSON; it is thread-safe, and one process at a time may use a file. `read`
turns the lines into the last session that they record, with its models and requests; it is pure.
`find_session` does both.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from attrs import Factory, define, evolve

from tinker_sync.errors import JournalError

_HEADER: Final = {"journal": 1}
_HEAD: Final = b'{"journal":1}\n'
# Windows would translate the ends of lines without O_BINARY.
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)

Line = dict[str, Any]

_log = logging.getLogger(__name__)


class JournalFile:
    """The open file of a journal. Thread-safe.

    An incomplete last line is removed. The process that wrote it ended, or its disk was full, before it could
    act on the line, for example send the request. A damaged line that is complete is an error.

    Args:
        path: the file; it is created if missing, readable only by its owner.

    Raises:
        JournalError: the file cannot be opened or written, is open as a journal here or in another process,
            is damaged, or is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._reported = False  # the deletion of the file was reported
        self._torn = 0  # the octets of an incomplete line at the end of the file; guarded by _lock
        try:
            self._descriptor = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            raise JournalError(f"the journal {path} cannot be opened: {error.strerror}") from error
        try:
            _claim(self._descriptor, path)
            self.lines = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, line: Line, *, sync: bool = False) -> None:
        """Append a line. When this method returns, the line survives a crash of the process.

        If the file was deleted, log a warning, once. That is no error, because the script has to save.

        Args:
            line: the content of the line.
            sync: also wait until the line is on the disk.

        Raises:
            JournalError: the line cannot be written, or this process is a fork of the owner of the file.
        """
        octets = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self.refuse_in_fork()
        with self._lock:
            try:
                if self._torn:
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - self._torn)
                    self._torn = 0
                # One system call writes all or nothing when the process crashes. A partial write means a full
                # disk. The next call, or the next process, removes what was written.
                written = os.write(self._descriptor, octets)
                self._torn = written if written < len(octets) else 0
                if sync:
                    os.fsync(self._descriptor)
                deleted = not os.fstat(self._descriptor).st_nlink
            except OSError as error:
                raise JournalError(f"the journal {self.path} cannot be written: {error}") from error
        if deleted and not self._reported:
            self._reported = True
            _log.warning(
                "the journal %s was deleted while it is in use: a new run will not know this one. Save the "
                "state, and go on from the checkpoint with another journal",
                self.path,
            )
        if written != len(octets):
            raise JournalError(f"the journal {self.path} cannot be written: the disk is full")

    def refuse_in_fork(self) -> None:
        """Raise an error in a forked child.

        Raises:
            JournalError: this process is a fork of the owner of the file.
        """
        if os.getpid() != self._process:
            raise JournalError("a forked process cannot write the journal of its parent")

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def renew_after_fork(self) -> None:
        """Close the child's copy of the descriptor, which would hold the lock after the parent's end."""
        self._lock = threading.Lock()
        self.close()

    def _read(self) -> list[Line]:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise JournalError(f"{self.path} is no file")
        raw = self.path.read_bytes()
        whole, _, torn = raw.rpartition(b"\n")
        if not (raw + b"\n").startswith(_HEAD) and not _HEAD.startswith(raw):
            raise JournalError(f"{self.path} is no journal, or one of a newer version")
        lines = [self._parse(number, text) for number, text in enumerate(whole.split(b"\n"), 1) if text]
        if torn:
            os.ftruncate(self._descriptor, len(raw) - len(torn))
        if not lines:
            self.append(_HEADER, sync=True)
        return lines[1:]

    def _parse(self, number: int, text: bytes) -> Line:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise JournalError(f"line {number} of the journal {self.path} is damaged")
        return line


def _claim(descriptor: int, path: Path) -> None:
    """Lock the file until it is closed or the process ends, if this system has such locks.

    Raises:
        JournalError: the file is locked, here or in another process.
    """
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise JournalError(f"another process uses the journal {path}") from error


@define
class Sent:
    """One request of a training client.

    Attributes:
        number: its sequence number.
        call: the name of the endpoint.
        digest: the digest of the request as it was sent.
        step: the step of `TrainingClient.steps` to which it belongs.
        request_id: the server's id of the request; None if the journal has no answer.
        arrived: True if its result has arrived.
        path: the path of the checkpoint that it has made; None if it has made none.
        resumes_at: the step to continue with after that checkpoint; None without a checkpoint or a step.
        replaces: the name of the checkpoint that it replaces, for a save with `overwrite`; None for others.
        sampler: the number of the sampler that it makes; None if it makes none.
        behind: the `stop` of the loop after whose last step it was sent; else None.
    """

    number: int
    call: str
    digest: str
    step: int | None = None
    request_id: str | None = None
    arrived: bool = False
    path: str | None = None
    resumes_at: int | None = None
    replaces: str | None = None
    sampler: int | None = None
    behind: int | None = None


@define
class ModelHistory:
    """One model of a session, and its requests by number.

    Attributes:
        digest: the digest of the arguments of its creation.
        model_id: the server's id of the model; None if the journal has no answer.
        request_id: the id of the request that made it.
        made_with: how many sequence numbers its creation used, for example one to load a checkpoint. The
            script's own calls are numbered after these.
        start: the checkpoint from which it was restored, and the first step after it; None if it was not
            restored from a checkpoint of a step.
        after: the number of the model that it replaces, if `TrainingClient.recover` made it; else None.
        sent: its requests by sequence number, without refused ones.
        refused: the status with which the server refused a request, by the number and the digest of the
            request; None for a request that failed in another way before it was accepted.
    """

    digest: str | None = None
    model_id: str | None = None
    request_id: str | None = None
    made_with: int = 0
    start: tuple[str, int] | None = None
    after: int | None = None
    sent: dict[int, Sent] = Factory(dict)
    refused: dict[tuple[int, str], int | None] = Factory(dict)

    def passed_over(self, number: int, digest: str) -> bool:
        """Return True if the server refused a request, and the script then sent another under its number.

        >>> refused = {(1, "a"): 422, (2, "c"): 401}
        >>> history = ModelHistory(sent={1: Sent(1, "optim_step", "b")}, refused=refused)
        >>> [history.passed_over(*request) for request in ((1, "a"), (1, "b"), (2, "c"))]
        [True, False, False]
        """
        taken = self.sent.get(number)
        return (number, digest) in self.refused and taken is not None and taken.digest != digest

    @property
    def last_request(self) -> str | None:
        """The id of the last accepted request, else of the request that made the model, else None."""
        accepted = [one for one in self.sent.values() if one.request_id]
        return max(accepted, key=lambda one: one.number).request_id if accepted else self.request_id

    @property
    def last_step(self) -> int | None:
        """The largest step of the requests; None if no request belongs to a step."""
        return max((one.step for one in self.sent.values() if one.step is not None), default=None)

    @property
    def checkpoint(self) -> tuple[str, int] | None:
        """The last checkpoint of a step, and the step to continue with after it; else `start`.

        Checkpoints that a later save without an answer may have replaced are left out.

        >>> sent = {1: Sent(1, "optim_step", "", 7, "r1"), 2: Sent(2, "save_weights", "", 7, "r2", path="p")}
        >>> ModelHistory(sent=sent).checkpoint
        ('p', 8)
        """
        for one in reversed(self._saves):
            if one.path is not None and one.step is not None:
                # A checkpoint before the `optim_step` of its step does not contain that step.
                stepped = any(
                    other.call == "optim_step" and other.step == one.step and other.number < one.number
                    for other in self.sent.values()
                )
                return one.path, one.step + stepped
        return self.start

    @property
    def _saves(self) -> list[Sent]:
        """The saved states, by ascending number, without those that a later save may have replaced."""
        saves: dict[str, Sent] = {}
        for one in sorted(self.sent.values(), key=lambda one: one.number):
            if one.call == "save_weights" and one.path is not None:
                name = one.path.rpartition("/")[2]
                saves.pop(name, None)  # the new one goes to the end
                saves[name] = one
            elif one.replaces is not None:  # it has no answer
                saves.pop(one.replaces, None)
        return list(saves.values())

    def refuse_replaced(self, path: str) -> None:
        """Raise an error if a later save without an answer may have replaced a checkpoint.

        >>> first = Sent(1, "save_weights", "", 7, "r1", path="tinker://run/weights/last")
        >>> again = Sent(2, "save_weights", "", 8, "r2", replaces="last")
        >>> ModelHistory(sent={1: first, 2: again}).refuse_replaced("tinker://run/weights/last")
        Traceback (most recent call last):
        tinker_sync.errors.JournalError: a save that replaces tinker://run/weights/last has no ...

        Raises:
            JournalError: it is not known which step the checkpoint contains.
        """
        saved = {one.path for one in list(self.sent.values())}  # another thread may note results
        if path in saved and path not in {one.path for one in self._saves}:
            raise JournalError(
                f"a save that replaces {path} has no answer, so it is not known which step is in it. Wait "
                "for the result of the save, or go on with another journal and "
                "create_training_client_from_state_with_optimizer"
            )

    def refuse_doubtful(self) -> None:
        """Raise an error if it is not known which step the only checkpoint contains.

        >>> first = Sent(1, "save_weights", "", 7, "r1", path="tinker://run/weights/last")
        >>> ModelHistory(sent={1: first}).refuse_doubtful()
        >>> again = Sent(2, "save_weights", "", 8, "r2", replaces="last")
        >>> ModelHistory(sent={1: first, 2: again}).refuse_doubtful()
        Traceback (most recent call last):
        tinker_sync.errors.JournalError: the model is gone, and ...

        Raises:
            JournalError: all checkpoints of steps may have been replaced by later saves without an answer.
        """
        saved = [one.path for one in self.sent.values() if one.path is not None and one.step is not None]
        if saved and self.checkpoint is None:
            raise JournalError(
                f"the model is gone, and a save that replaces {saved[-1]} had no answer, so the journal "
                "cannot tell which step is in it. Look at its time, then go on with another journal and "
                "create_training_client_from_state_with_optimizer"
            )

    @property
    def last_path(self) -> str | None:
        """The path of the last saved state, else that of `start`, else None.

        States that a later save without an answer may have replaced are left out.
        """
        if self._saves:
            return self._saves[-1].path
        return self.start[0] if self.start is not None else None

    @property
    def unread(self) -> list[Sent]:
        """The accepted requests whose results have not arrived, by ascending number."""
        unread = [one for one in self.sent.values() if one.request_id is not None and not one.arrived]
        return sorted(unread, key=lambda one: one.number)


@define
class SessionHistory:
    """A session at the server with the address `url`, and its models by their numbers in the session."""

    session_id: str
    url: str
    status: str | None = None
    """The status of its end; None while it goes on."""
    models: dict[int, ModelHistory] = Factory(dict)
    lost: dict[int, ModelHistory] = Factory(dict)
    """The last models of the sessions that this one continues, by the numbers of the first models in their
    chains. This session makes each of them again."""

    @property
    def ends(self) -> list[int]:
        """The numbers of the models that no other model replaces, with those that are still to be made."""
        replaced = {model.after for model in self.models.values()}
        return sorted((self.models.keys() | self.lost.keys()) - replaced)

    def history_of(self, number: int) -> ModelHistory:
        """Return the history of a model; a new, empty one if the session has no such model.

        The history of a lost model that this session has not made yet starts from its last checkpoint.
        """
        model = self.models.get(number) or ModelHistory()
        lost = self.lost.get(number)
        if model.model_id is not None or lost is None:
            return model
        return evolve(model, digest=lost.digest, start=lost.checkpoint)

    def left(self) -> dict[int, ModelHistory]:
        """Return the models that are lost with this session, as `lost` of the session that continues it."""
        made = {
            number: evolve(self.latest_of(number), digest=model.digest)
            for number, model in self.models.items()
            if model.after is None and model.model_id is not None
        }
        return {**self.lost, **made}

    def origin_of(self, number: int) -> int:
        """Return the number of the first model in the chain of replacements that leads to model `number`."""
        after = self.models[number].after if number in self.models else None
        return number if after is None else self.origin_of(after)

    def latest_of(self, number: int) -> ModelHistory:
        """Return the history of the last model in the chain of replacements that begins with model `number`.

        The chain ends before a replacement that the server has not made, or that began without a checkpoint
        of a step. A model that this session has not made is the one in `lost`. The history of an unknown
        number is empty.

        >>> models = {0: ModelHistory(model_id="l"), 9: ModelHistory(model_id="m", start=("p", 3), after=0)}
        >>> SessionHistory("s", "url", models=models).latest_of(0).start
        ('p', 3)
        """
        latest = self.models.get(number) or ModelHistory()
        if latest.model_id is None:
            return self.lost.get(number, latest)
        for later, model in self.models.items():
            if model.after == number and model.start is not None and model.model_id is not None:
                latest = self.latest_of(later)
        return latest


def read(lines: Iterable[dict[str, Any]], path: Path = Path()) -> SessionHistory | None:
    """Return the history of the last session, or None if the journal has no session.

    A session that follows one without success continues it.

    Raises:
        JournalError: a line does not follow from those before it; the error names it and the file, `path`.
    """
    session: SessionHistory | None = None
    for number, line in enumerate(lines, 2):  # after the head
        try:
            if "session" in line:
                lost = session.left() if session is not None and session.status != "success" else {}
                session = SessionHistory(line["session"], line["url"], lost=lost)
            elif session is None:
                continue
            elif "over" in line:
                session.status = line["over"]
            else:
                _add(session.models.setdefault(line["of"], ModelHistory()), line)
        except (KeyError, TypeError) as error:
            raise JournalError(f"line {number} of the journal {path} is damaged") from error
    return session


def find_session(path: Path) -> SessionHistory:
    """Return the last session of a journal, unless it has ended with success. Add no records.

    Raises:
        JournalError: there is no such session or no journal, or the journal is in use.
    """
    if not path.exists():
        raise JournalError(f"there is no journal {path}")
    file = JournalFile(path)
    file.close()
    last = read(file.lines, path)
    if last is None or last.status == "success":
        raise JournalError(f"the journal {path} has no session to go on with")
    return last


def _add(model: ModelHistory, line: dict[str, Any]) -> None:
    if "model" in line:
        model.model_id, model.request_id, model.digest = line["model"], line["id"], line["digest"]
        model.made_with = len(model.sent)
        model.start = tuple(line["start"]) if line.get("start") else None
        model.after = line.get("after")
    elif "send" in line:
        number = line["send"]
        more: dict[str, Any] = {name: line.get(name) for name in ("step", "replaces", "sampler", "behind")}
        model.sent[number] = Sent(number, line["call"], line["digest"], **more)
    elif "sent" in line:
        model.sent[line["sent"]].request_id = line["id"]
    elif "refused" in line:
        del model.sent[line["refused"]]
        model.refused[line["refused"], line["digest"]] = line.get("status")
    elif "settled" in line:
        # The number is used up, either by the original request or by the harmless one of `attach`.
        model.sent[line["settled"]] = Sent(line["settled"], "", "", None, "", arrived=True)
    elif "arrived" in line:
        one = model.sent[line["arrived"]]
        one.arrived, one.path = True, line.get("path")
