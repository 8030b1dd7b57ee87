"""The table of statuses decides at every stage: which of them are tried again, and how often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.file_server import FileServer
from support.hasty import sampler_of, trainer_of, world
from support.tinker_stub import Answer
from support.values import for_each

import tinker_sync
from tinker_sync import types
from tinker_sync._base import policy
from tinker_sync._base.policy import Meaning, Rule
from tinker_sync.errors import TinkerError
from tinker_sync.runtime.futures import APIFuture

PATIENCE_S = 120.0
STATUS = 529
DOWN = Answer(STATUS, {"detail": "down"})


@pytest.fixture(autouse=True)
def two_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    row = (Rule(Meaning.RETRY, 2),) * len(policy.Stage)
    monkeypatch.setattr(policy, "TABLE", {**policy.TABLE, STATUS: row})


def ask(service: Any) -> APIFuture[Any]:
    return service.create_rest_client().list_sessions()  # type: ignore[no-any-return]


def sample(service: Any) -> APIFuture[Any]:
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    return sampler_of(service).sample(prompt, 1, params)


def train(service: Any) -> APIFuture[Any]:
    return trainer_of(service).optim_step(types.AdamParams())


@for_each(
    ("path", "call"),
    [("/sessions", ask), ("/asample", sample), ("/retrieve_future", sample), ("/retrieve_future", train)],
)
def test_a_request_is_sent_again_as_often_as_the_row_says(
    path: str, call: Callable[[Any], APIFuture[Any]]
) -> None:
    with world() as (stub, service):
        trainer_of(service)  # its polls are not counted
        sampler_of(service)
        before = len(stub.asked(path))
        stub.script(path, *[DOWN] * 5)
        with pytest.raises(TinkerError, match=str(STATUS)):
            call(service).result(PATIENCE_S)
        assert len(stub.asked(path)) - before == 3


PASSES = (408, 409, 425, 429, 500, 502, 503, 504, 507, 599)
FINAL = (400, 401, 403, 410, 418, 422, 501, 505)
PASSES_IN_POLLS = (400, 404, 408, 425, 429, 500, 501, 502, 503, 504, 505, 507, 599)
FINAL_IN_POLLS = (401, 403, 405, 409, 418)


@for_each(
    ("path", "call", "passes", "final"),
    [
        ("/sessions", ask, PASSES, FINAL),
        ("/asample", sample, PASSES, FINAL),
        ("/retrieve_future", sample, PASSES_IN_POLLS, FINAL_IN_POLLS),
    ],
)
def test_a_request_is_sent_again_after_the_statuses_that_may_pass_and_after_no_other(
    path: str, call: Callable[[Any], APIFuture[Any]], passes: tuple[int, ...], final: tuple[int, ...]
) -> None:
    with world() as (stub, service):
        for status in (*passes, *final):
            before = len(stub.asked(path))
            stub.script(path, Answer(status, {"detail": "no"}))
            failed = call(service).exception(PATIENCE_S) is not None
            assert (status, failed, len(stub.asked(path)) - before) == (
                status,
                status in final,
                1 if status in final else 2,
            )


@for_each(
    ("path", "call", "status", "most"),
    [("/sessions", ask, 409, 3), ("/asample", sample, 409, 3), ("/sessions", ask, 500, 5)],
)
def test_a_failure_that_lasts_is_final(
    path: str, call: Callable[[Any], APIFuture[Any]], status: int, most: int
) -> None:
    """Such as a conflict that is no short lock, or a request at which the server fails each time."""
    with world() as (stub, service):
        stub.script(path, *[Answer(status, {"detail": "no"})] * 9)
        assert call(service).exception(PATIENCE_S) is not None
        assert len(stub.asked(path)) == most


def test_other_failures_do_not_count() -> None:
    with world() as (stub, service):
        stub.script("/sessions", DOWN, Answer(409, {}), DOWN, Answer(409, {}))
        ask(service).result(PATIENCE_S)


def test_a_sample_that_is_throttled_more_often_than_it_may_be_tried_is_sent_until_it_is_accepted() -> None:
    with world() as (stub, service):
        sampler = service.create_sampling_client(
            base_model="stub/model", retry_config=tinker_sync.RetryConfig(max_attempts=2)
        )
        down = Answer(503, {"detail": "soon"})
        stub.script("/asample", *[Answer(429)] * 2, down, *[Answer(429)] * 2)
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        sampler.sample(prompt, 1, params).result(PATIENCE_S)
        tries = [asked.headers["x-retry-count"] for asked in stub.asked("/asample")]
        assert tries == ["0", "0", "0", "1", "1", "1"]


def test_a_part_of_a_file_is_fetched_again_as_often_as_the_row_says(tmp_path: Path) -> None:
    with FileServer({"a": b"abc"}, statuses=[STATUS] * 5) as server:
        with tinker_sync.ServiceClient(base_url=server.url, api_key="tml-x") as service:
            fetched = service.create_rest_client().download_checkpoint(
                "tinker://run/external_weights/final", tmp_path / "to"
            )
            with pytest.raises(TinkerError, match=str(STATUS)):
                fetched.result(PATIENCE_S)
        assert len(server.statuses) == 2
