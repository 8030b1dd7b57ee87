"""The table of calls is complete, consistent and usable by client and server."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.values import for_each

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._model import Model
from tinker_sync.wire.endpoints import ENDPOINTS, Endpoint, find
from tinker_sync.wire.paths import PathTemplate, encode_query, segment, segments

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


# ------------------------------------------------- Paths and queries are built from ids and matched
TEXT = st.text(min_size=1).filter(lambda text: text not in (".", ".."))


@given(TEXT.filter(lambda text: text.isprintable() or text.isascii()))
def test_a_segment_round_trips(text: str) -> None:
    encoded = segment(text)
    assert not set(encoded) & set("/?# \r\n\t%") - {"%"}
    assert encoded.isascii()
    assert unquote(encoded) == text


@pytest.mark.parametrize("bad", ["", ".", "..", "\ud800"])
def test_dots_and_empty_ids_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInputError):
        segment(bad)


@pytest.mark.parametrize("bad", ["../x", "weights/..", "weights/", "/a", "a/b/c", "weights/a/../../x"])
def test_bad_checkpoint_ids_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInputError):
        segments(bad)


def test_queries_follow_the_protocol() -> None:
    zone = timezone(timedelta(hours=2))
    assert (
        encode_query(
            {
                "day": datetime(2026, 1, 1, 2, tzinfo=zone),
                "naive": datetime(2026, 1, 1),  # noqa: DTZ001 - taken for UTC
                "yes": True,
                "no": False,
                "ids": ["a", "b"],
                "none": None,
                "empty": "",
                "nothing": [],
                "zero": 0,
            }
        )
        == "day=2026-01-01T00:00:00Z&naive=2026-01-01T00:00:00Z&yes=true&no=false&ids=a,b&zero=0"
    )


def test_ids_must_match_the_template() -> None:
    template = PathTemplate("/a/{one}/b")
    for ids in ({}, {"two": 1}, {"one": 1, "two": 2}):
        with pytest.raises(TypeError):
            template.fill(ids)


@given(TEXT.filter(str.isprintable), st.sampled_from(["weights", "sampler_weights", "external_weights"]))
def test_filling_and_matching_are_inverse(name: str, kind: str) -> None:
    template = PathTemplate("/r/{run}/c/{*checkpoint}/ttl")
    if "/" in name:
        return
    ids = {"run": name, "checkpoint": f"{kind}/{name}"}
    assert template.match(template.fill(ids)) == ids
