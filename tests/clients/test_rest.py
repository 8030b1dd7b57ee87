"""Calls about runs, checkpoints, sessions and accounts: requests, results and refusals."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import date, datetime, timezone
from typing import Any
from urllib.parse import urlencode

import pytest
from support.hasty import FLAGS, hasty_service, trainer_of
from support.raising import refuse_threads
from support.shifting_lists import ListServer
from support.tinker_stub import Answer, Asked, Stub, StubServer

import tinker_sync
from tinker_sync import errors, types
from tinker_sync.clients.rest import AdminClient, RestClient
from tinker_sync.clients.rest.bulk import BulkProgress

PATH = "tinker://run-1/weights/step 1"
BILLING = {"data": [], "sessions": {}}
STORAGE = {"data": []}
AUDIT = {"entries": []}


@pytest.fixture
def service(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker_sync.ServiceClient]:
    monkeypatch.setenv("TINKER_PACE", "0.01")  # for the pauses before retries
    with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-rest") as made:  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def rest(service: tinker_sync.ServiceClient) -> RestClient:
    return RestClient(service.holder)


def last(stub: Stub) -> Asked:
    """Return the latest request other than those for settings."""
    return [asked for asked in stub.log if "/client/" not in asked.path][-1]


STEP_1 = "training_runs/run-1/checkpoints/weights/step%201"
CALLS: list[tuple[str, tuple[Any, ...], str, Any]] = [
    ("get_training_run", ("run-1",), "GET training_runs/run-1?access_scope=owned", None),
    (
        "get_training_run_by_tinker_path",
        (PATH, "accessible"),
        "GET training_runs/run-1?access_scope=accessible",
        None,
    ),
    (
        "list_training_runs",
        (5, 10, "owned", "p-1"),
        "GET training_runs?access_scope=owned&limit=5&offset=10&project_id=p-1",
        None,
    ),
    ("list_checkpoints", ("run-1",), "GET training_runs/run-1/checkpoints", None),
    ("list_user_checkpoints", (), "GET checkpoints?limit=100&offset=0", None),
    ("delete_checkpoint", ("run-1", "weights/a"), "DELETE training_runs/run-1/checkpoints/weights/a", None),
    ("delete_checkpoint_from_tinker_path", (PATH,), f"DELETE {STEP_1}", None),
    ("publish_checkpoint_from_tinker_path", (PATH,), f"POST {STEP_1}/publish", None),
    ("unpublish_checkpoint_from_tinker_path", (PATH,), f"DELETE {STEP_1}/publish", None),
    ("set_checkpoint_ttl_from_tinker_path", (PATH, 3600), f"PUT {STEP_1}/ttl", {"ttl_seconds": 3600}),
    ("set_checkpoint_ttl_from_tinker_path", (PATH, None), f"PUT {STEP_1}/ttl", {"ttl_seconds": None}),
    ("get_weights_info_by_tinker_path", (PATH,), "POST weights_info", {"tinker_path": PATH}),
    ("get_server_capabilities", (), "GET get_server_capabilities", None),
    ("get_sampler", ("s:sample:0",), "GET samplers/s:sample:0", None),
    ("get_session", ("session-1",), "GET sessions/session-1?access_scope=owned", None),
    ("list_sessions", (), "GET sessions?access_scope=owned&limit=20&offset=0", None),
    (
        "assign_session_project",
        ("session-1", "p-1"),
        "PUT sessions/session-1/project",
        {"project_id": "p-1"},
    ),
    (
        "copy_weights",
        (PATH, "p-2"),
        "POST copy_weights",
        {"source_path": PATH, "destination_project_id": "p-2"},
    ),
]


@pytest.mark.parametrize(("name", "arguments", "request_line", "body"), CALLS)
def test_each_call_sends_its_request(
    stub: Stub, rest: RestClient, name: str, arguments: tuple[Any, ...], request_line: str, body: Any
) -> None:
    if name == "assign_session_project":
        stub.script("/sessions/session-1/project", Answer(200, {}))
    future = getattr(rest, name)(*arguments)
    assert isinstance(future, Future)
    future.result(120)
    asked = last(stub)
    query = urlencode(sorted(asked.query.items()), doseq=True)
    path = asked.path.removeprefix("/api/v1/") + ("?" + query if query else "")
    assert f"{asked.method} {path}" == request_line
    assert asked.json() == body
    assert asked.headers["x-sdk-method"] == f"RestClient.{name}"
    assert asked.headers["x-sdk-version"] == "0.38.0"


def test_ids_never_become_more_than_a_part_of_the_path(stub: Stub, rest: RestClient) -> None:
    rest.get_training_run("../../admin?x=1").result(120)
    assert last(stub).path == "/api/v1/training_runs/..%2F..%2Fadmin%3Fx=1"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_training_run", ("",)),
        ("list_checkpoints", ("",)),
        ("delete_checkpoint", ("", "weights/a")),
        ("delete_checkpoint", ("run-1", "")),
        ("get_session", ("",)),
        ("get_sampler", ("",)),
        ("get_session", ("..",)),
        ("get_sampler", (None,)),
        ("get_training_run", ("half \ud800",)),
        ("list_checkpoints", ("tinker://run-1/weights/a",)),
        ("delete_checkpoint", ("run-1", "weights/../../run-2")),
        ("delete_checkpoint", ("run-1", "weights/..")),
        ("get_training_run", ("run-1", "everybody's")),
        ("list_training_runs", (20, 0, "everybody's")),
        ("delete_checkpoint_from_tinker_path", ("run-1/weights/a",)),
        ("get_external_weights_urls", (PATH,)),
        ("copy_weights", (PATH,)),
        ("get_checkpoint_archive_url_from_tinker_path", ("tinker://x",)),
        ("get_training_run_by_tinker_path", ("tinker://run-1/..",)),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_sent(
    stub: Stub, rest: RestClient, name: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(errors.InvalidInputError):
        getattr(rest, name)(*arguments)
    assert stub.log == []


def test_a_call_beside_the_end_of_the_client_is_refused_by_name(
    rest: RestClient, service: tinker_sync.ServiceClient
) -> None:
    """The client is not marked as closed yet, and its workers take no more jobs."""
    runtime = service.holder
    runtime.pools.rest.close()
    runtime.pools.awaited.close()
    with pytest.raises(errors.ClientClosedError):
        rest.list_training_runs()
    with pytest.raises(errors.ClientClosedError):
        runtime.pools.awaited.run_call(list)


def test_calls_do_not_wait_for_the_chunks_of_a_pass() -> None:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    datum = types.Datum(prompt, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
    config = {**FLAGS, "fwdbwd_max_chunk_len": 1}
    with StubServer(config=config) as stub, hasty_service(stub) as service:
        trainer = trainer_of(service)
        trainer.optim_step(types.AdamParams()).result(120)
        release = stub.hold("/forward_backward", 40)
        passed = trainer.forward_backward([datum] * 40, "cross_entropy")
        stub.await_asked("/forward_backward", 8)  # the others wait for room among the bytes under way
        try:
            assert RestClient(service.holder).list_user_checkpoints().result(120).checkpoints == []
            assert not passed.done()
        finally:
            release.set()
        passed.result(120)


def test_nor_does_a_large_pass_wait_for_calls_that_the_server_does_not_answer() -> None:
    prompt = types.ModelInput.from_ints(range(20_000))  # a worker makes the request of a pass of this size
    datum = types.Datum(prompt, {"target_tokens": list(range(20_000))})
    with StubServer(config=FLAGS) as stub, hasty_service(stub) as service:
        trainer, rest = trainer_of(service), RestClient(service.holder)
        release = stub.hold("/checkpoints", 8)
        listed = [rest.list_user_checkpoints() for _ in range(8)]
        stub.await_asked("/checkpoints", 8)
        try:
            trainer.forward_backward([datum], "cross_entropy").result(120)
            assert not any(each.done() for each in listed)
        finally:
            release.set()
        for each in listed:
            each.result(120)


def test_copies_are_made_once_however_often_they_are_asked_for(stub: Stub, rest: RestClient) -> None:
    stub.script("/copy_weights", Answer(503, {}), Answer(abort="after"))
    copied = rest.copy_weights(PATH, "p-1", weights_access_token="tml-other").result(120)
    assert copied == "tinker://copy/weights/step 1"
    asked = stub.asked("/copy_weights")
    assert len(asked) == 3
    assert len({each.headers["x-idempotency-key"] for each in asked}) == 1
    assert {each.headers["x-tinker-weights-access-token"] for each in asked} == {"tml-other"}
    assert not any(b"tml-other" in each.body for each in asked)


def test_the_address_of_an_archive_is_not_fetched(stub: Stub, rest: RestClient) -> None:
    """The client returns the address of an archive and its expiry, and does not fetch the archive."""
    where = "/training_runs/run-1/checkpoints/sampler_weights/a/archive"
    headers = {
        "Location": "https://files.invalid/a.tar.gz?signature=s",
        "Expires": "Thu, 01 Jan 2026 00:00:00 GMT",
    }
    stub.script(where, Answer(302, None, headers), Answer(302, None, {"Location": "https://files.invalid/b"}))
    found = rest.get_checkpoint_archive_url("run-1", "sampler_weights/a").result(120)
    assert found.url.endswith("signature=s")
    assert found.expires == datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert "signature" not in repr(found)
    again = rest.get_checkpoint_archive_url_from_tinker_path("tinker://run-1/sampler_weights/a").result(120)
    assert again.expires > datetime.now(timezone.utc)
    assert all("files.invalid" not in asked.path for asked in stub.log)  # the archive was not fetched


def test_an_archive_whose_address_expires_at_no_possible_time(stub: Stub, rest: RestClient) -> None:
    """The call ended with a bare OverflowError."""
    never = "Thu, 01 Jan 1970 00:00:99999999999999999999 GMT"
    headers = {"Location": "https://files.invalid/a", "Expires": never}
    stub.script("/training_runs/run-1/checkpoints/sampler_weights/a/archive", Answer(302, None, headers))
    found = rest.get_checkpoint_archive_url("run-1", "sampler_weights/a").result(120)
    assert found.expires > datetime.now(timezone.utc)


def test_a_trace_is_waited_for(stub: Stub) -> None:
    pending, ready = Answer(body={"status": "pending"}), Answer(body={"status": "ready", "url": "https://t"})
    with hasty_service(stub) as service:
        rest = RestClient(service.holder)
        stub.script("/sessions/s-1/trace_export", pending, pending, ready)
        assert rest.export_session_trace("s-1").result(120) == "https://t"
        stub.script("/sessions/s-1/trace_export", Answer(body={"status": "failed", "error": "too old"}))
        with pytest.raises(RuntimeError, match="too old") as failed:
            rest.export_session_trace("s-1").result(120)
        assert isinstance(failed.value, errors.TinkerError)


def test_a_search_warns_that_it_is_experimental(stub: Stub, rest: RestClient) -> None:
    stub.script("/sessions/search", Answer(body={"sessions": []}))
    with pytest.warns(errors.ExperimentalWarning):
        found = rest.search_sessions(types.SessionSearchRequest(display_name="a")).result(120)
    assert found.sessions == []
    assert last(stub).json()["owner"] == {"type": "own"}


def test_the_owner_of_a_key_is_unknown_without_a_token(rest: RestClient) -> None:
    with pytest.raises(RuntimeError, match="whoami") as failed:
        rest.whoami().result(120)
    assert isinstance(failed.value, errors.UnsupportedByServerError)
    assert type(pickle.loads(pickle.dumps(failed.value))) is type(failed.value)


def test_the_token_names_the_owner_of_the_key() -> None:
    claims = {"sub": "tml:user:1", "org_id": "o-1", "email": "", "exp": 9999999999}
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    token = f"eyJhbGciOiJub25lIn0.{payload}.c2ln"
    with StubServer(config={"pjwt_auth_enabled": True, "custom_loss_server_side": False}) as stub:
        stub.script("/auth/token", Answer(body={"jwt": token}))
        url = stub.url  # type: ignore[attr-defined]
        with tinker_sync.ServiceClient(base_url=url, api_key="tml-rest") as service:
            who = RestClient(service.holder).whoami().result(120)
    assert who == types.WhoamiResponse(user_urn="tml:user:1", org_urn="tml:organization:o-1", email=None)


# ------------------------------------------------------------------------------------ billing and audit


def test_usage_in_a_window_of_time(stub: Stub, rest: RestClient) -> None:
    stub.script("/billing/usage/events", Answer(body=BILLING), Answer(body=BILLING))
    admin = AdminClient(rest.holder)
    begin = datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert admin.get_billing_usage(begin, "2026-01-02T00:00:00Z").result(120).data == []
    assert last(stub).query == {
        "starting_on": ["2026-01-01T00:00:00Z"],
        "ending_before": ["2026-01-02T00:00:00Z"],
    }
    with pytest.raises(errors.InvalidInputError):
        admin.get_billing_usage("yesterday", begin)


def test_storage_and_audit(stub: Stub, rest: RestClient) -> None:
    stub.script("/billing/usage/checkpoints/current", Answer(body=STORAGE))
    stub.script("/audit", Answer(body=AUDIT))
    admin = AdminClient(rest.holder)
    admin.get_current_checkpoint_storage_usage("p-1").result(120)
    assert last(stub).query == {"project_id": ["p-1"]}
    admin.get_audit_log("projects", date(2026, 1, 31)).result(120)
    assert last(stub).query == {"event_type": ["projects"], "day": ["2026-01-31"]}
    with pytest.raises(errors.InvalidInputError, match="event_type"):
        admin.get_audit_log("everything")  # type: ignore[arg-type]


def test_the_old_home_names_the_new_one(stub: Stub, rest: RestClient) -> None:
    stub.script("/audit", Answer(body=AUDIT))
    with pytest.warns(FutureWarning, match="AdminClient") as warned:
        assert rest.get_audit_log().result(120).entries == []
    assert [each.filename for each in warned] == [__file__]


# ------------------------------------------------------------------------------------------- construction


def test_clients_of_one_server_and_key_share_their_connections(stub: Stub) -> None:
    url = stub.url  # type: ignore[attr-defined]
    one, two = RestClient(base_url=url, api_key="tml-a"), AdminClient(base_url=url, api_key="tml-a")
    other = RestClient(base_url=url, api_key="tml-b")
    assert one.holder is two.holder
    assert one.holder is not other.holder
    assert one.list_sessions().result(120).sessions == []
    assert stub.asked("/create_session") == []
    for client in (one, other):
        client.holder.close("success").result(120)
    assert RestClient(base_url=url, api_key="tml-a").holder is not one.holder


def test_calls_can_be_awaited(rest: RestClient) -> None:
    async def main() -> types.TrainingRun:
        await rest.list_checkpoints("run-1")
        return await rest.get_training_run_async("run-1")

    assert asyncio.run(main()).training_run_id == "run-1"


def test_older_scripts_may_use_the_holder(stub: Stub) -> None:
    service = tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-rest")  # type: ignore[attr-defined]
    rest = service.create_rest_client()
    assert rest.list_sessions().result(120).sessions == []
    assert service.holder.get_session_id() == "session-0"
    service.holder.close().result(120)
    assert stub.paths()[-1] == "/sessions/session-0/finish"


# ---- Calls for many checkpoints: the requests run concurrently, and a failure does not stop the others
PATHS = [f"tinker://run/weights/c{number}" for number in range(50)]


@pytest.fixture
def bulk(stub: Stub) -> Iterator[RestClient]:
    with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-bulk") as service:  # type: ignore[attr-defined]
        yield RestClient(service.holder)


def where(number: int) -> str:
    return f"/training_runs/run/checkpoints/weights/c{number}"


def deleted(stub: Stub) -> list[str]:
    return [asked.path.rpartition("/")[2] for asked in list(stub.log) if asked.method == "DELETE"]


def test_all_are_deleted_and_each_failure_is_reported(stub: Stub, bulk: RestClient) -> None:
    stub.script(where(7), Answer(404, {"detail": "no such checkpoint"}))
    stub.script(where(9), Answer(403, {"detail": "not yours"}))
    told: list[BulkProgress] = []
    whole = threading.Event()

    def listen(state: BulkProgress) -> None:
        told.append(state)
        if len(told) == 51:
            whole.set()

    wanted = [*PATHS[:20], "tinker://nonsense", *PATHS[20:]]
    outcomes = bulk.delete_checkpoints(iter(wanted), progress=listen).result(120)
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


def test_concurrent_requests_are_limited(stub: Stub, bulk: RestClient) -> None:
    gate, lock, now, most = threading.Event(), threading.Lock(), [0], [0]

    def watch(asked: Asked) -> Answer:
        with lock:
            now[0] += 1
            most[0] = max(most)
        return Answer(usual=True, gate=gate)

    for number in range(12):
        stub.script(where(number), watch)
    future = bulk.delete_checkpoints(PATHS[:12], parallel=4)
    for number in range(4):
        stub.await_asked(where(number))
    assert now[0] == 4
    gate.set()
    assert all(outcome.ok for outcome in future.result(120))


def test_a_404_after_a_lost_answer_counts_as_deleted(stub: Stub, bulk: RestClient) -> None:
    stub.script(where(0), Answer(abort="after"), Answer(404, {"detail": "no such checkpoint"}))
    (outcome,) = bulk.delete_checkpoints(PATHS[:1]).result(120)
    assert outcome.ok


def test_times_to_live(stub: Stub, bulk: RestClient) -> None:
    assert all(outcome.ok for outcome in bulk.set_checkpoints_ttl(PATHS[:3], 60).result(120))
    assert all(outcome.ok for outcome in bulk.set_checkpoints_ttl(PATHS[:1], None).result(120))
    asked = [asked for asked in stub.log if asked.method == "PUT"]
    assert sorted(seen.path.split("/")[-2] for seen in asked) == ["c0", "c0", "c1", "c2"]
    assert [json.loads(seen.body) for seen in asked] == [{"ttl_seconds": 60}] * 3 + [{"ttl_seconds": None}]


def test_a_path_given_twice_is_deleted_once(stub: Stub, bulk: RestClient) -> None:
    outcomes = bulk.delete_checkpoints([PATHS[0], PATHS[0]]).result(120)
    assert len(outcomes) == 2
    assert deleted(stub) == ["c0"]


def test_an_empty_list_sends_nothing(stub: Stub, bulk: RestClient) -> None:
    assert bulk.delete_checkpoints([]).result(120) == []
    assert stub.log == []


@pytest.mark.parametrize(("paths", "options"), [(PATHS[0], {}), (PATHS, {"parallel": 0})])
def test_wrong_arguments_are_refused(bulk: RestClient, paths: Any, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError):
        bulk.delete_checkpoints(paths, **options)


def test_closing_the_client_ends_the_deletion(stub: Stub) -> None:
    gate = threading.Event()
    with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-bulk") as service:  # type: ignore[attr-defined]
        bulk = RestClient(service.holder)
        for number in range(50):
            stub.script(where(number), Answer(usual=True, gate=gate))
        future = bulk.delete_checkpoints(PATHS, parallel=2)
        stub.await_asked(where(0))
        service.close(pending=0.0).result(120)
    gate.set()
    with pytest.raises(errors.ClientClosedError):
        future.result(120)
    assert len(deleted(stub)) <= 3


def test_a_cancelled_deletion_stops(stub: Stub, bulk: RestClient) -> None:
    gate = threading.Event()
    for number in range(50):
        stub.script(where(number), Answer(usual=True, gate=gate))
    future = bulk.delete_checkpoints(PATHS, parallel=2)
    stub.await_asked(where(0))
    stub.await_asked(where(1))
    assert future.cancel()
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tinker-bulk"):
            thread.join(120)
    assert sorted(deleted(stub)) == ["c0", "c1"]


def test_without_a_thread_the_future_fails(
    stub: Stub, bulk: RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_threads(patch, "tinker-bulk")
        future = bulk.delete_checkpoints(PATHS[:2])
    with pytest.raises(errors.TinkerError, match="no thread"):
        future.result(120)
    assert all(outcome.ok for outcome in bulk.delete_checkpoints(PATHS[:2]).result(120))
    assert sorted(deleted(stub)) == ["c0", "c1"]


def test_what_is_listed_can_be_deleted() -> None:
    server = ListServer(30)
    with (
        StubServer(server),
        tinker_sync.ServiceClient(base_url=server.url, api_key="tml-bulk") as service,  # type: ignore[attr-defined]
    ):
        bulk = RestClient(service.holder)
        assert all(
            each.ok for each in bulk.delete_checkpoints(bulk.iter_user_checkpoints(limit=5)).result(120)
        )
    assert sorted(deleted(server)) == [f"e-00000{number}" for number in range(5)]
