"""`RunJournal`: the journal of a service client, with its sessions and the records of its models.

A session takes the id of an earlier session from the journal, if it is to continue that one.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Final

from tinker_sync._base.secret import mask_url
from tinker_sync.errors import JournalError
from tinker_sync.journal.file import JournalFile, ModelHistory, SessionHistory, read
from tinker_sync.journal.record import TrainingRecord

_log: Final = logging.getLogger("tinker_sync.journal")


class RunJournal:
    """The journal of one service client. Thread-safe.

    Args:
        path: the file.
        url: the address of the server.
        replays: True if the script makes its calls again; False for `attach`.

    Raises:
        JournalError: the file cannot be used, or its unfinished session is at another server.
    """

    def __init__(self, path: Path, url: str, *, replays: bool = True) -> None:
        self._file = JournalFile(path)
        self._url = mask_url(url)
        self._lock = threading.Lock()
        self.replays = replays
        self._records: dict[int, TrainingRecord] = {}  # guarded by _lock
        try:
            self.last = self._read_last(path)
            """The last session of the file; None if there is no session, or if it ended with success."""
        except JournalError:
            self._file.close()
            raise
        self.resumed = False
        """True if the earlier session goes on."""

    def _read_last(self, path: Path) -> SessionHistory | None:
        last = read(self._file.lines, path)
        if last is None or last.status == "success":
            return None
        if last.url != self._url:
            raise JournalError(
                f"the journal {path} is of {last.url}, and this client of {self._url}; name another file"
            )
        return last

    @property
    def session_id(self) -> str | None:
        """The id of the earlier session if this run can continue it; None if it must begin a new one.

        A session cannot be continued if its end is recorded, or if the server has accepted no request for its
        models. With `replays`, it also cannot be continued after `TrainingClient.recover` has replaced a
        model from a checkpoint of a step, because the script would repeat calls of the replaced model. The
        new session then starts from the last checkpoint of the replacement, or else from the one that the
        replacement was restored from.
        """
        last = self.last
        if last is None or last.status is not None or not self.last_requests:
            return None
        made = [(number, model) for number, model in last.models.items() if model.model_id is not None]
        if self.replays and any(last.latest_of(number) is not model for number, model in made):
            return None
        return last.session_id

    @property
    def last_requests(self) -> list[str]:
        """The ids of the last accepted requests, by which `Session` asks if the server still has the models.

        With `replays`, these are the requests of the models that replace no other, because the script repeats
        their calls; for `attach`, those of the models that no other replaces.
        """
        last = self.last
        if last is None:
            return []
        asked = [number for number, model in last.models.items() if model.after is None]
        requests = [last.history_of(number).last_request for number in (asked if self.replays else last.ends)]
        return [request for request in requests if request is not None]

    def resume(self) -> None:
        """Set `resumed`, and log that training goes on in the earlier session."""
        self.resumed = True
        assert self.last is not None  # noqa: S101  # `session_id` was not None
        _log.warning("training goes on in session %s, see %s", self.last.session_id, self._file.path)

    def begin(self, session_id: str) -> None:
        """Record a new session, before its first request. Log if it replaces an unfinished one.

        Raises:
            JournalError: the session cannot be recorded.
        """
        self._file.append({"session": session_id, "url": self._url}, sync=True)
        if self.last is not None:
            _log.warning("session %s is over; %s is new", self.last.session_id, session_id)

    @property
    def models(self) -> list[int]:
        """The numbers of the models of the earlier session, without those that others replace."""
        return self.last.ends if self.last is not None else []

    @property
    def unfinished(self) -> bool:
        """True if a loop over the steps of a model, which no other replaces, was left before its end."""
        with self._lock:
            records = list(self._records.values())
        replaced = {record.after for record in records}
        left = [record for record in records if record.step is not None and not record.complete]
        return any(record.model_seq_id not in replaced for record in left)

    def end(self, status: str) -> None:
        """Record the end of the session. Log a failure to write."""
        try:
            self._file.append({"over": status}, sync=True)
        except JournalError as error:
            _log.warning("the end of the session was not recorded: %s", error)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def renew_after_fork(self) -> None:
        """Close the file in a forked child, because it belongs to the parent."""
        self._file.renew_after_fork()

    def refuse_in_fork(self) -> None:
        """Raise a JournalError in a forked child; see `JournalFile.refuse_in_fork`."""
        self._file.refuse_in_fork()

    def record_of(self, model_seq_id: int) -> TrainingRecord:
        """Return the record of a model, by its number in the session."""
        with self._lock:
            if model_seq_id not in self._records:
                self._records[model_seq_id] = TrainingRecord(self, model_seq_id)
            return self._records[model_seq_id]

    def history_of(self, model_seq_id: int) -> ModelHistory:
        """Return `SessionHistory.history_of` of the earlier session; without a session, an empty history."""
        return ModelHistory() if self.last is None else self.last.history_of(model_seq_id)

    def origin_of(self, model_seq_id: int) -> int:
        """Return the number of the first model in the chain of replacements that leads to the given one."""
        return model_seq_id if self.last is None else self.last.origin_of(model_seq_id)

    def latest_of(self, model_seq_id: int) -> ModelHistory:
        """Return `SessionHistory.latest_of` of the earlier session; without a session, an empty history."""
        return ModelHistory() if self.last is None else self.last.latest_of(model_seq_id)

    def write(self, line: dict[str, Any], *, sync: bool = False) -> None:
        """Append a line to the file; see `JournalFile.append`."""
        self._file.append(line, sync=sync)
