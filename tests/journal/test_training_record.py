"""The record of one training client, request by request, with a send function of the test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinker_sync.errors import JournalError
from tinker_sync.journal.file import JournalFile, read
from tinker_sync.journal.record import TrainingRecord
from tinker_sync.journal.run import RunJournal
from tinker_sync.runtime.futures import APIFuture

URL = "http://127.0.0.1:1"


class NotTaken(Exception):
    """The failure of a request that the server refused."""


class Part:
    def __init__(self, endpoint: str, step: int | None = None, body: bytes = b"{}") -> None:
        self.future: APIFuture[Any] = APIFuture()
        self.endpoint = endpoint
        self.step = step
        self.behind: int | None = None
        self.number: int | None = None
        self.decode: Callable[[Any], Any] = lambda answer: answer
        self.known: str | None = None
        self._body = body

    def bytes_for(self, number: int) -> bytes:
        return self._body

    def keep(self, body: bytes) -> None:
        assert body == self._body


class Run:
    """One run of a script with a journal. The server accepts each request unless `failure` is set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = RunJournal(path, URL)
        self.record: TrainingRecord = self.journal.record_of(0)
        self.failure: BaseException | None = None
        self.sent: list[tuple[int, str | None]] = []
        self._send = self.record.around(self._take, NotTaken)

    def begin(self) -> Run:
        self.journal.begin("session")
        self.record.open("digest")
        self.record.note_model("model", "req-0", "digest")
        return self

    def resume(self) -> Run:
        self.journal.resume()
        self.record.open("digest")
        return self

    def _take(self, part: Part, number: int, ended: Any) -> None:
        self.sent.append((number, part.known))
        if self.failure is None:
            part.future._mark_accepted(f"req-{number}")
        ended(self.failure)

    def send(self, part: Part, number: int) -> list[BaseException | None]:
        """Send a part, and return the ends that the queue is told."""
        ends: list[BaseException | None] = []
        self._send(part, number, ends.append)
        return ends

    def lines(self) -> list[str]:
        """Return the kinds of the lines about requests, such as `send 1`."""
        kinds = ("send", "sent", "refused", "arrived")
        read_lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [f"{kind} {line[kind]}" for line in read_lines for kind in kinds if kind in line]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run.journal").begin()
    yield run
    run.journal.close()


def again(run: Run) -> Run:
    """Begin the next run of the script, which goes on in the session."""
    run.journal.close()
    return Run(run.path).resume()


def test_a_request_is_recorded_before_it_is_sent_and_its_answer_and_result_after(run: Run) -> None:
    part = Part("optim_step")
    assert run.send(part, 1) == [None]
    assert run.lines() == ["send 1", "sent 1"]
    part.future.resolve(SimpleNamespace())
    assert run.lines() == ["send 1", "sent 1", "arrived 1"]


@pytest.mark.parametrize("end", [lambda future: future.fail(KeyError("a")), lambda future: future.cancel()])
def test_a_failure_is_no_result(run: Run, end: Any) -> None:
    part = Part("optim_step")
    run.send(part, 1)
    end(part.future)
    assert run.lines() == ["send 1", "sent 1"]
    then = again(run)
    assert [sent.number for sent in then.record.unread] == [1]
    then.journal.close()


def test_a_result_that_an_earlier_run_has_got_arrives_once(run: Run) -> None:
    first = Part("optim_step")
    run.send(first, 1)
    first.future.resolve(SimpleNamespace())
    then = again(run)
    repeated = Part("optim_step")
    then.send(repeated, 1)
    assert then.sent == [(1, "req-1")]
    repeated.future.resolve(SimpleNamespace())
    assert then.lines() == ["send 1", "sent 1", "arrived 1"]
    then.journal.close()


def test_the_number_of_a_refused_request_is_free_and_the_refusal_is_repeated(run: Run) -> None:
    run.failure = NotTaken()
    assert run.send(Part("optim_step", body=b"refused"), 1) == [run.failure]
    run.failure = None
    assert run.send(Part("optim_step", body=b"good"), 1) == [None]
    assert run.lines() == ["send 1", "refused 1", "send 1", "sent 1"]
    then = again(run)
    with pytest.raises(NotTaken) as failed:
        then.send(Part("optim_step", body=b"refused"), 1)
    # `run.failure` had no status: a deadline, or a missing key.
    assert str(failed.value.__cause__).startswith("optim_step failed in an earlier run before the server")
    assert then.send(Part("optim_step", body=b"good"), 1) == [None]
    assert then.sent == [(1, "req-1")]
    then.journal.close()


def test_another_request_under_a_number_is_refused(run: Run) -> None:
    run.send(Part("optim_step", body=b"a"), 1)
    with pytest.raises(JournalError, match="number 1"):
        run.send(Part("optim_step", body=b"b"), 1)


def test_only_a_save_for_a_sampler_may_get_another_number_of_its_sampler(run: Run) -> None:
    """The name stands in the settings of a loss here. A pass of megabytes is not searched for it."""
    for number, call in enumerate(("save_weights_for_sampler", "forward_backward"), 1):
        run.send(Part(call, body=b'{"sampling_session_seq_id":3}'), number)
    then = again(run)
    sampling = Part("save_weights_for_sampler", body=b'{"sampling_session_seq_id":3}')
    assert then.send(sampling, 1) == [None]
    with pytest.raises(JournalError, match="number 2"):
        then.send(Part("forward_backward", body=b'{"sampling_session_seq_id":4}'), 2)
    then.journal.close()


def test_an_answer_that_cannot_be_recorded_ends_the_call(run: Run) -> None:
    ends: list[BaseException | None] = []

    def send(part: Part, number: int, ended: Any) -> None:
        run.journal.close()
        part.future._mark_accepted("req-1")
        ended(None)

    run.record.around(send, NotTaken)(Part("optim_step"), 1, ends.append)
    assert [type(end) for end in ends] == [JournalError]


def test_a_checkpoint_contains_the_step_if_it_comes_after_it(run: Run) -> None:
    def save(number: int, path: str, step: int) -> tuple[str, int] | None:
        part = Part("save_weights", step, json.dumps({"path": path}).encode())
        run.send(part, number)
        part.future.resolve(part.decode(SimpleNamespace(path=path)))
        return run.record.checkpoint

    run.send(Part("optim_step", 3), 1)
    assert save(2, "after", 3) == ("after", 4)
    assert save(3, "before", 4) == ("before", 4)
    then = again(run)
    assert then.journal.history_of(0).checkpoint == ("before", 4)
    then.journal.close()


def test_a_checkpoint_before_the_step_does_not_contain_it() -> None:
    lines: list[dict[str, Any]] = [
        {"session": "s", "url": URL},
        {"of": 0, "send": 1, "call": "load_weights", "digest": "a"},
        {"of": 0, "model": "m", "id": "r", "digest": "d"},
        {"of": 0, "send": 2, "call": "save_weights", "digest": "b", "step": 7},
        {"of": 0, "arrived": 2, "path": "p"},
        {"of": 0, "send": 3, "call": "optim_step", "digest": "c", "step": 7},
    ]
    history = read(lines)
    assert history is not None
    assert history.models[0].checkpoint == ("p", 7)
    assert history.models[0].made_with == 1  # the request that loaded the weights


def test_models_and_sessions_are_on_the_disk_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = os.fsync
    run = Run(tmp_path / "run.journal")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), sync(descriptor)))
    run.begin()
    assert len(synced) == 2
    run.journal.close()


def test_a_journal_of_another_server_is_refused_and_stays_free(run: Run) -> None:
    run.send(Part("optim_step"), 1)
    run.journal.close()
    with pytest.raises(JournalError, match="name another file"):
        RunJournal(run.path, "http://127.0.0.1:2")
    again(run).journal.close()


def test_a_file_that_is_no_journal_stays_free(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    path.write_bytes(b"no journal\n")
    with pytest.raises(JournalError, match="is no journal"):
        JournalFile(path)
    path.write_bytes(b"")
    JournalFile(path).close()
