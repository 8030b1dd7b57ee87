"""A limit in the table of statuses holds at every stage: one row decides how often a status is retried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.each import for_each
from support.file_server import FileServer
from support.hasty import sampler_of, trainer_of, world
from support.tinker_stub import Answer

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


def test_other_failures_do_not_count() -> None:
    with world() as (stub, service):
        stub.script("/sessions", DOWN, Answer(409, {}), DOWN, Answer(409, {}))
        ask(service).result(PATIENCE_S)


def test_a_part_of_a_file_is_fetched_again_as_often_as_the_row_says(tmp_path: Path) -> None:
    with FileServer({"a": b"abc"}, statuses=[STATUS] * 5) as server:
        with tinker_sync.ServiceClient(base_url=server.url, api_key="tml-x") as service:
            fetched = service.create_rest_client().download_checkpoint(
                "tinker://run/external_weights/final", tmp_path / "to"
            )
            with pytest.raises(TinkerError, match=str(STATUS)):
                fetched.result(PATIENCE_S)
        assert len(server.statuses) == 2
