"""The table of calls is complete, consistent and usable by client and server."""

from __future__ import annotations

import pytest
from support.each import for_each

from tinker_sync import types
from tinker_sync.types._model import Model
from tinker_sync.wire.endpoints import ENDPOINTS, Endpoint, find

ROWS = list(ENDPOINTS.values())
IDS = {
    "run": "run-1",
    "checkpoint": "weights/a",
    "session": "s",
    "sampler": "s:sample:0",
    "name": "n",
    "model": "m",
}


def filled(endpoint: Endpoint) -> str:
    return endpoint.path_for(**{name: IDS[name] for name in endpoint.path.names})


@for_each("endpoint", ROWS)
def test_every_named_type_exists(endpoint: Endpoint) -> None:
    for name, found in [
        (endpoint.request, endpoint.request_type),
        (endpoint.reply, endpoint.reply_type),
        (endpoint.result, endpoint.result and getattr(types, endpoint.result)),
    ]:
        if name is None:
            assert found is None
        else:
            assert found is getattr(types, name)
            assert issubclass(found, Model)


@for_each("endpoint", ROWS)
def test_rows_are_consistent(endpoint: Endpoint) -> None:
    assert endpoint.path.text.startswith("/api/v1/")
    assert (endpoint.method == "GET") <= (endpoint.body == "none")
    assert (endpoint.request is not None) <= (endpoint.body != "none")
    assert (endpoint.result is not None) == (endpoint.promises is not None)
    assert (endpoint.reply == "UntypedAPIFuture") == (endpoint.result is not None)
    assert endpoint.repeatable or endpoint.method == "POST"


@for_each("endpoint", ROWS)
def test_a_filled_path_is_matched(endpoint: Endpoint) -> None:
    ids = {name: IDS[name] for name in endpoint.path.names}
    assert find(endpoint.method, filled(endpoint)) == (endpoint, ids)


def test_unknown_calls_are_not_found() -> None:
    assert find("GET", "/api/v1/nothing") is None
    assert find("PATCH", "/api/v1/training_runs") is None
    assert find("GET", "/api/v1/training_runs/a/b") is None


def test_a_checkpoint_may_have_the_name_of_a_verb() -> None:
    found = find("DELETE", "/api/v1/training_runs/r/checkpoints/weights/publish")
    assert (found[0].name, found[1]["checkpoint"]) == ("delete_checkpoint", "weights/publish")


def test_ids_are_encoded_and_decoded() -> None:
    path = ENDPOINTS["get_sampler"].path_for(sampler="a/b?c")
    assert path == "/api/v1/samplers/a%2Fb%3Fc"
    assert find("GET", path) == (ENDPOINTS["get_sampler"], {"sampler": "a/b?c"})


def test_only_calls_that_change_something_may_not_be_repeated() -> None:
    for row in ROWS:
        assert not (row.changes and row.method == "GET"), row.name
        assert row.repeatable or row.changes or row.name == "create_sampling_session"


@pytest.mark.parametrize(
    ("name", "timeout_s"),
    [
        ("retrieve_future", 45), ("retrieve_futures", 45), ("cancel_future", 30), ("session_heartbeat", 10),
        ("dynamic_config", 10), ("telemetry", 5), ("optim_step", None),
    ],
)  # fmt: skip
def test_timeouts_follow_the_protocol(name: str, timeout_s: float | None) -> None:
    assert ENDPOINTS[name].timeout_s == timeout_s


def test_only_the_first_calls_and_those_about_a_key_use_the_key_itself() -> None:
    about_keys = {"get_api_key", "revoke_api_key"}
    assert {row.name for row in ROWS if row.credential == "exchange"} == {
        *("client_config", "auth_token"),
        *about_keys,
    }
