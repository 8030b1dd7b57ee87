"""`read` returns the history that the lines of a journal describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinker_sync.errors import JournalError
from tinker_sync.journal.file import ModelHistory, Sent, find_session, read
from tinker_sync.journal.run import RunJournal

MADE: dict[str, Any] = {"of": 0, "model": "m", "id": "r0", "digest": "d"}
SESSION = {"session": "s", "url": "u"}


def sent(number: int, call: str, step: int | None, path: str | None = None) -> Sent:
    return Sent(number, call, "", step, f"r{number}", path=path)


def model(*requests: Sent, start: tuple[str, int] | None = None) -> ModelHistory:
    return ModelHistory(start=start, sent={one.number: one for one in requests})


def test_the_last_session_counts() -> None:
    assert read([]) is None
    last = read([SESSION, MADE, {"over": "success"}, {**SESSION, "session": "s2"}])
    assert (last.session_id, last.status, last.models) == ("s2", None, {})


def test_a_session_continues_those_without_success_before_it() -> None:
    save = [
        {"of": 0, "send": 1, "call": "save_weights", "digest": "x", "step": 4},
        {"of": 0, "sent": 1, "id": "r1"},
        {"of": 0, "arrived": 1, "path": "p"},
    ]
    lines = [SESSION, MADE, *save, {**SESSION, "session": "s2"}, {**SESSION, "session": "s3"}]
    last = read(lines)
    assert (last.ends, last.history_of(0).start, last.latest_of(0).checkpoint) == ([0], ("p", 4), ("p", 4))
    assert (last.history_of(0).model_id, last.history_of(0).digest) == (None, "d")
    made = read([*lines, {**MADE, "model": "m3", "start": ["p", 4]}])
    assert (made.history_of(0).model_id, made.ends) == ("m3", [0])
    after_success = read([*lines, {"over": "success"}, {**SESSION, "session": "s4"}])
    assert (after_success.ends, after_success.history_of(0).start) == ([], None)


def test_requests_are_known_by_their_numbers() -> None:
    request = {"of": 0, "send": 1, "call": "optim_step", "digest": "x", "step": 4}
    last = read([SESSION, MADE, request, {**request, "send": 2}, {"of": 0, "sent": 1, "id": "r1"}])
    history = last.models[0]
    assert (history.model_id, history.last_step, history.last_request) == ("m", 4, "r1")
    assert [one.number for one in history.unread] == [1]
    last = read([SESSION, MADE, request, {"of": 0, "sent": 1, "id": "r1"}, {"of": 0, "arrived": 1}])
    assert last.models[0].unread == []


def test_a_model_is_known_by_the_request_that_made_it() -> None:
    last = read([SESSION, {**MADE, "start": ["p", 3]}])
    assert (last.models[0].last_request, last.models[0].start) == ("r0", ("p", 3))


def test_training_goes_on_behind_the_last_checkpoint() -> None:
    step, save = sent(1, "optim_step", 7), sent(2, "save_weights", 7, "p")
    assert model(step, save).checkpoint == ("p", 8)
    assert model(sent(1, "save_weights", 7, "p"), sent(2, "optim_step", 7)).checkpoint == ("p", 7)
    assert model(step, save, sent(3, "save_weights", 7)).checkpoint == ("p", 8)  # not acknowledged
    assert model(step, save, sent(4, "save_weights", None, "q")).checkpoint == ("p", 8)  # belongs to no step
    assert model(step, start=("o", 5)).checkpoint == ("o", 5)
    assert model(step).checkpoint is None


@pytest.mark.parametrize(
    "line",
    [
        {"of": 0, "sent": 9, "id": "r9"},
        {"of": 0, "arrived": 9},
        {"of": 0, "refused": 9, "digest": "x"},
        {"of": 0, "model": "m"},
        {"of": 0, **MADE, "start": 5},
        {"of": [], "send": 1, "call": "optim_step", "digest": "x"},
        {"session": "t"},
        {"other": 1},
    ],
    ids=str,
)
def test_a_line_that_does_not_follow_is_named(line: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    path.write_text("".join(json.dumps(each) + "\n" for each in [{"journal": 1}, SESSION, MADE, line]))
    path.write_text(path.read_text().replace(" ", ""))
    for _ in range(2):  # the first failure lets the file go
        with pytest.raises(JournalError, match=rf"line 4 of the journal {path} is damaged"):
            RunJournal(path, "u")
        with pytest.raises(JournalError, match="line 4"):
            find_session(path)


def test_a_checkpoint_that_may_be_replaced_does_not_count() -> None:
    def save(number: int, step: int, path: str | None, replaces: str | None = "last") -> Sent:
        return Sent(number, "save_weights", "", step, f"r{number}", path=path, replaces=replaces)

    first, named = save(2, 1, "run/last"), save(1, 0, "run/zero", None)
    unanswered, answered = save(3, 3, None), save(4, 5, "run/last")
    other = save(3, 3, None, "other")
    assert model(named, first).checkpoint == model(named, first, other).checkpoint == ("run/last", 1)
    assert model(named, first, unanswered).checkpoint == ("run/zero", 0)
    assert model(named, first, unanswered).last_path == "run/zero"
    assert model(named, first, unanswered, answered).checkpoint == ("run/last", 5)
    assert model(first, unanswered, start=("o", 1)).checkpoint == ("o", 1)
    assert (model(first, unanswered).checkpoint, model(first, unanswered).last_path) == (None, None)
    with pytest.raises(JournalError, match="cannot tell which step is in it"):
        model(first, unanswered).refuse_doubtful()
    model(first).refuse_doubtful()
    model(named, first, unanswered).refuse_doubtful()
