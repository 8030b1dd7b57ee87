"""Calls for many checkpoints: the requests run concurrently, and a failure does not stop the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.raising import refuse_threads
from support.shifting_lists import ListServer
from support.tinker_stub import Answer, Asked, Stub, StubServer

import tinker_sync
from tinker_sync import errors
from tinker_sync.clients.rest import RestClient
from tinker_sync.clients.rest.bulk import BulkProgress

PATHS = [f"tinker://run/weights/c{number}" for number in range(50)]


@pytest.fixture
def rest(stub: Stub) -> Iterator[RestClient]:
    with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-bulk") as service:  # type: ignore[attr-defined]
        yield RestClient(service.holder)


def where(number: int) -> str:
    return f"/training_runs/run/checkpoints/weights/c{number}"


def deleted(stub: Stub) -> list[str]:
    return [asked.path.rpartition("/")[2] for asked in list(stub.log) if asked.method == "DELETE"]


def test_all_are_deleted_and_each_failure_is_reported(stub: Stub, rest: RestClient) -> None:
    stub.script(where(7), Answer(404, {"detail": "no such checkpoint"}))
    stub.script(where(9), Answer(403, {"detail": "not yours"}))
    told: list[BulkProgress] = []
    whole = threading.Event()

    def listen(state: BulkProgress) -> None:
        told.append(state)
        if len(told) == 51:
            whole.set()

    wanted = [*PATHS[:20], "tinker://nonsense", *PATHS[20:]]
    outcomes = rest.delete_checkpoints(iter(wanted), progress=listen).result(120)
    assert [outcome.tinker_path for outcome in outcomes] == wanted
    failed = {outcome.tinker_path: type(outcome.error) for outcome in outcomes if not outcome.ok}
    assert failed == {
        PATHS[7]: errors.NotFoundError,
        PATHS[9]: errors.PermissionDeniedError,
        "tinker://nonsense": errors.InvalidInputError,
    }
    assert sorted(deleted(stub)) == sorted(f"c{number}" for number in range(50))
    assert whole.wait(120)
    assert max(told, key=lambda state: state.done) == BulkProgress(done=51, failed=3, total=51)


def test_concurrent_requests_are_limited(stub: Stub, rest: RestClient) -> None:
    gate, lock, now, most = threading.Event(), threading.Lock(), [0], [0]

    def watch(asked: Asked) -> Answer:
        with lock:
            now[0] += 1
            most[0] = max(most)
        return Answer(usual=True, gate=gate)

    for number in range(12):
        stub.script(where(number), watch)
    future = rest.delete_checkpoints(PATHS[:12], parallel=4)
    for number in range(4):
        stub.await_asked(where(number))
    assert now[0] == 4
    gate.set()
    assert all(outcome.ok for outcome in future.result(120))


def test_a_404_after_a_lost_answer_counts_as_deleted(stub: Stub, rest: RestClient) -> None:
    stub.script(where(0), Answer(abort="after"), Answer(404, {"detail": "no such checkpoint"}))
    (outcome,) = rest.delete_checkpoints(PATHS[:1]).result(120)
    assert outcome.ok


def test_times_to_live(stub: Stub, rest: RestClient) -> None:
    assert all(outcome.ok for outcome in rest.set_checkpoints_ttl(PATHS[:3], 60).result(120))
    assert all(outcome.ok for outcome in rest.set_checkpoints_ttl(PATHS[:1], None).result(120))
    asked = [asked for asked in stub.log if asked.method == "PUT"]
    assert sorted(seen.path.split("/")[-2] for seen in asked) == ["c0", "c0", "c1", "c2"]
    assert [json.loads(seen.body) for seen in asked] == [{"ttl_seconds": 60}] * 3 + [{"ttl_seconds": None}]


def test_a_path_given_twice_is_deleted_once(stub: Stub, rest: RestClient) -> None:
    outcomes = rest.delete_checkpoints([PATHS[0], PATHS[0]]).result(120)
    assert len(outcomes) == 2
    assert deleted(stub) == ["c0"]


def test_an_empty_list_sends_nothing(stub: Stub, rest: RestClient) -> None:
    assert rest.delete_checkpoints([]).result(120) == []
    assert stub.log == []


@pytest.mark.parametrize(("paths", "options"), [(PATHS[0], {}), (PATHS, {"parallel": 0})])
def test_wrong_arguments_are_refused(rest: RestClient, paths: Any, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError):
        rest.delete_checkpoints(paths, **options)


def test_closing_the_client_ends_the_deletion(stub: Stub) -> None:
    gate = threading.Event()
    with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-bulk") as service:  # type: ignore[attr-defined]
        rest = RestClient(service.holder)
        for number in range(50):
            stub.script(where(number), Answer(usual=True, gate=gate))
        future = rest.delete_checkpoints(PATHS, parallel=2)
        stub.await_asked(where(0))
        service.close(pending=0.0).result(120)
    gate.set()
    with pytest.raises(errors.ClientClosedError):
        future.result(120)
    assert len(deleted(stub)) <= 3


def test_a_cancelled_deletion_stops(stub: Stub, rest: RestClient) -> None:
    gate = threading.Event()
    for number in range(50):
        stub.script(where(number), Answer(usual=True, gate=gate))
    future = rest.delete_checkpoints(PATHS, parallel=2)
    stub.await_asked(where(0))
    stub.await_asked(where(1))
    assert future.cancel()
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tinker-bulk"):
            thread.join(120)
    assert sorted(deleted(stub)) == ["c0", "c1"]


def test_without_a_thread_the_future_fails(
    stub: Stub, rest: RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_threads(patch, "tinker-bulk")
        future = rest.delete_checkpoints(PATHS[:2])
    with pytest.raises(errors.TinkerError, match="no thread for this call: can't start new thread"):
        future.result(120)
    assert all(outcome.ok for outcome in rest.delete_checkpoints(PATHS[:2]).result(120))
    assert sorted(deleted(stub)) == ["c0", "c1"]


def test_what_is_listed_can_be_deleted() -> None:
    server = ListServer(30)
    with (
        StubServer(server),
        tinker_sync.ServiceClient(base_url=server.url, api_key="tml-bulk") as service,  # type: ignore[attr-defined]
    ):
        rest = RestClient(service.holder)
        assert all(
            each.ok for each in rest.delete_checkpoints(rest.iter_user_checkpoints(limit=5)).result(120)
        )
    assert sorted(deleted(server)) == [f"e-00000{number}" for number in range(5)]
