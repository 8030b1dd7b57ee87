"""Calls that users write themselves: routes that the client does not know, and further fields and headers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.embedded import KEY, base_model
from support.tinker_stub import Answer, StubServer

from tinker_sync import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinker_sync.errors import (
    APIConnectionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedByServerError,
)
from tinker_sync.local.engine.host import Host
from tinker_sync.local.server import http
from tinker_sync.local.server.app import build
from tinker_sync.local.server.http import Application, Request, ServerThread
from tinker_sync.local.server.state import Flags
from tinker_sync.local.store import Store

DATA = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
PROMPT = ModelInput.from_ints([1, 2, 3])
STEP = AdamParams(learning_rate=1e-3)
NEW_ROUTES = {
    "/api/v1/gentle_pass": "/api/v1/forward_backward",
    "/api/v1/gentle_step": "/api/v1/optim_step",
    "/api/v1/gentle_sample": "/api/v1/asample",
}
RAW_PASS = {
    "forward_backward_input": {
        "loss_fn": "cross_entropy",
        "data": [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}},
            }
        ],
    }
}
RAW_SAMPLE = {
    "seq_id": 7,
    "num_samples": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 1},
}


class Grown(Application):
    """The embedded server with further routes, which this client does not know."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self.max_body_bytes = app.max_body_bytes
        self.numbers: list[tuple[str, Any]] = []
        """The path and the number of each call on a model, in order of arrival."""

    def keeps_body(self, request: Request) -> bool:
        return self.app.keeps_body(request)

    async def startup(self) -> None:
        await self.app.startup()

    async def shutdown(self) -> None:
        await self.app.shutdown()

    async def __call__(self, request: Request) -> http.Answer:
        path = request.path
        if path in NEW_ROUTES or path.endswith("/save_weights"):
            self.numbers.append((path.rpartition("/")[2], json.loads(request.body)["seq_id"]))
        return await self.app(attrs.evolve(request, path=NEW_ROUTES.get(path, path)))


@contextmanager
def grown(directory: Path) -> Iterator[tuple[Grown, ServiceClient]]:
    with Store(directory) as store:
        app = Grown(build(store, Host([base_model()]), key=KEY, flags=Flags.of(hold_s=5.0)))
        with ServerThread(app, key=KEY) as thread, ServiceClient(base_url=thread.url, api_key=KEY) as service:
            yield app, service


@contextmanager
def stubbed(**behaviour: Any) -> Iterator[tuple[Any, ServiceClient]]:
    with StubServer(**behaviour) as stub, ServiceClient(base_url=stub.url, api_key="tml-key") as service:
        yield stub, service


def test_unknown_routes_train_in_their_place_among_known_ones(tmp_path: Path) -> None:
    with grown(tmp_path) as (app, service):
        training = service.create_lora_training_client("tinker-sync/tiny", rank=4, seed=1)
        step = {"type": "optim_step", "adam_params": {"learning_rate": 1e-3}}
        losses = []
        for _ in range(3):
            passed = training.request("/api/v1/gentle_pass", RAW_PASS)
            training.request("/api/v1/gentle_step", step)
            losses.append(passed)
        known = training.forward_backward(DATA, "cross_entropy")
        saved = training.save_state("after")
        first, *_, last = [each.result()["metrics"]["loss:sum"] for each in losses]
        assert known.result().metrics["loss:sum"] < last < first
        assert saved.result().path.endswith("/after")
    assert app.numbers == [
        *(("gentle_pass", 1), ("gentle_step", 2), ("gentle_pass", 3)),
        *(("gentle_step", 4), ("gentle_pass", 5), ("gentle_step", 6)),
        ("save_weights", 8),
    ]


def test_an_unknown_route_samples(tmp_path: Path) -> None:
    with grown(tmp_path) as (_, service):
        sampling = service.create_sampling_client(base_model="tinker-sync/tiny").result()
        params = SamplingParams(max_tokens=4, temperature=0.0)
        body: dict[str, Any] = {
            "sampling_session_id": sampling.sampling_session_id,
            "seq_id": 10**9,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4, "temperature": 0.0},
        }
        plain = sampling.sample(PROMPT, 1, params).result().sequences[0].tokens
        for path in ("/api/v1/gentle_sample", "/api/v1/asample"):
            raw = service.request("POST", path, body, promise=True).result()
            assert raw["sequences"][0]["tokens"] == plain
            body["seq_id"] += 1


def test_a_refused_raw_call_fails_alone(tmp_path: Path) -> None:
    with grown(tmp_path) as (_, service):
        training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        refused = training.request("/api/v1/no_such_call", {"x": 1})
        stepped = training.optim_step(STEP)
        with pytest.raises(NotFoundError):
            refused.result()
        stepped.result()
        with pytest.raises(NotFoundError):
            service.request("GET", "/api/v1/no_such_call").result()


def test_a_cancelled_raw_call_is_cancelled_at_the_server() -> None:
    with stubbed(dynamic_config={"sample_cancel_enabled": True}, latency_s=3600.0) as (stub, service):
        sampling = service.create_sampling_client(base_model="stub/model").result()
        body = {**RAW_SAMPLE, "sampling_session_id": sampling.sampling_session_id}
        future = service.request("POST", "/api/v1/asample", body, promise=True)
        stub.await_asked("/retrieve_future")
        assert future.cancel()
        (cancelled,) = stub.await_asked("/cancel_future")
        assert cancelled.json() == {"request_id": future.request_id}


def test_a_promise_of_another_call_is_refused() -> None:
    with stubbed(latency_s=3600.0) as (stub, service):
        sampling = service.create_sampling_client(base_model="stub/model").result()
        mine = sampling.sample(PROMPT, 1, SamplingParams(max_tokens=1))
        stub.await_asked("/retrieve_future")
        stub.script("/asample", Answer(body={"request_id": mine.request_id}))
        body = {**RAW_SAMPLE, "sampling_session_id": sampling.sampling_session_id}
        other = service.request("POST", "/api/v1/asample", body, promise=True)
        stub.await_asked("/asample", 3)
        stub.await_asked("/retrieve_future", 2)
        assert other.request_id not in (None, mine.request_id)


def test_a_call_cancelled_in_its_queue_is_not_sent() -> None:
    with stubbed() as (stub, service):
        release = stub.hold("/training_runs", 64)
        others = [service.request("GET", "/api/v1/training_runs") for _ in range(64)]
        stub.await_asked("/training_runs")
        future = service.request("POST", "/api/v1/new_call", {"x": 1}, promise=True)
        assert future.cancel()
        release.set()
        for other in others:
            other.result()
        assert service.request("GET", "/api/v1/sessions").result() == {"sessions": []}
        assert stub.asked("/new_call") == []


def test_a_body_that_is_changed_after_its_call_is_sent_as_it_was() -> None:
    with stubbed() as (stub, service):
        release = [stub.hold("/training_runs", 64), stub.hold("/create_model")]
        others = [service.request("GET", "/api/v1/training_runs") for _ in range(64)]
        stub.await_asked("/training_runs")  # no worker is left for a raw call
        training = service.create_lora_training_client("stub/model", rank=8)
        body: dict[str, Any] = {"x": [0]}
        query, extra = {"y": 0}, {"beta": [0]}
        made = service.request("POST", "/api/v1/new_call", body, query=query)
        trained = training.request("/api/v1/new_step", body)
        stepped = training.optim_step(STEP, extra_body=extra)
        body["x"][0], query["y"], extra["beta"][0] = 1, 1, 1
        for each in release:
            each.set()
        for future in (*others, made, trained, stepped):
            future.exception()
        (asked,) = stub.asked("/new_call")
        assert (asked.json()["x"], asked.query["y"]) == ([0], ["0"])
        assert stub.asked("/new_step")[0].json()["x"] == [0]
        assert stub.asked("/optim_step")[0].json()["beta"] == [0]


def test_what_may_be_sent_again() -> None:
    """A read is repeated after its answer is lost; an unknown call that changes something is not."""
    with stubbed() as (stub, service):
        stub.script("/new_list", Answer(abort="before"), Answer(body={"found": [1]}))
        stub.script("/new_call", Answer(abort="before"))
        assert service.request("GET", "/api/v1/new_list").result() == {"found": [1]}
        with pytest.raises(APIConnectionError) as caught:
            service.request("POST", "/api/v1/new_call", {"x": 1}).result()
        assert caught.value.ambiguous
        assert len(stub.asked("/new_call")) == 1


def test_a_raw_request_has_the_key_the_query_and_the_headers() -> None:
    with stubbed() as (stub, service):
        stub.script("/new_list", Answer(body=[1, {"a": None}]), Answer(status=200))
        headers = {"X-Team": "blue"}
        asked = {"limit": 3, "name": None}
        made = service.request("GET", "/api/v1/new_list", query=asked, extra_headers=headers)
        assert made.result() == [1, {"a": None}]
        assert service.request("GET", "/api/v1/new_list").result() is None
        first = stub.asked("/new_list")[0]
        assert (first.headers["x-api-key"], first.headers["x-team"]) == ("tml-key", "blue")
        assert first.query == {"limit": ["3"]}


def test_further_fields_and_headers_of_public_methods() -> None:
    extra: dict[str, Any] = {"extra_body": {"beta": {"x": 1}}, "extra_headers": {"X-Trace": "abc"}}
    with stubbed(config=None, proto_results=False) as (stub, service):  # an open server
        training = service.create_lora_training_client("stub/model", rank=8)
        futures = [
            training.forward_backward(DATA, "cross_entropy", **extra),
            training.forward(DATA, "cross_entropy", **extra),
            training.optim_step(STEP, **extra),
        ]
        sampling = service.create_sampling_client(base_model="stub/model")
        params = SamplingParams(max_tokens=1)
        futures.append(sampling.sample(PROMPT, 1, params, **extra))
        plain = sampling.sample(PROMPT, 1, params)
        changed = sampling.sample(PROMPT, 1, params, extra_body={"num_samples": 2})
        for future in [*futures, plain]:
            future.result()
        changed.exception()
        paths = ("/forward_backward", "/forward", "/optim_step", "/asample")
        sent = [asked for path in paths for asked in stub.asked(path)]
        with_extra = [each for each in sent if each.headers.get("x-trace") == "abc"]
        assert [each.json()["beta"] for each in with_extra] == [{"x": 1}] * 4
        assert sorted(each.json()["seq_id"] for each in with_extra) == [0, 1, 2, 3]
        others = [each.json() for each in stub.asked("/asample")[1:]]
        assert ["beta" in each for each in others] == [False, False]
        assert sorted(each["num_samples"] for each in others) == [1, 2]


def test_protobuf_has_no_place_for_further_fields_but_the_request_for_headers() -> None:
    with stubbed() as (stub, service):
        training = service.create_lora_training_client("stub/model", rank=8).result()
        with pytest.raises(UnsupportedByServerError, match="extra_headers"):
            training.forward_backward(DATA, "cross_entropy", extra_body={"beta": 1})
        training.forward_backward(DATA, "cross_entropy", extra_headers={"X-Trace": "abc"}).result()
        (asked,) = stub.asked("/forward_backward")
        assert asked.headers["x-trace"] == "abc"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda s, t: s.request("FETCH", "/x"), "FETCH"),
        (lambda s, t: s.request("GET", "x"), "path"),
        (lambda s, t: s.request("GET", "/x?limit=3"), "query="),
        (lambda s, t: s.request("POST", "/x", {"a": object()}), "body"),
        (lambda s, t: s.request("GET", "/x", {"limit": 3}), "query="),
        (lambda s, t: s.request("GET", "/x", query=["limit"]), "query"),
        (lambda s, t: s.request("GET", "/x", query={"limit": object()}), "limit"),
        (lambda s, t: s.request("POST", "/x", {}, extra_headers={"X": "a\nb"}), "extra_headers"),
        (lambda s, t: t.request("/x", {"seq_id": 3}), "seq_id"),
        (lambda s, t: t.optim_step(STEP, extra_body=[1]), "extra_body"),
        (lambda s, t: t.forward(DATA, "cross_entropy", extra_body={"seq_id": 1}), "seq_id"),
    ],
)
def test_what_cannot_be_sent_is_refused_first(made: Any, said: str) -> None:
    with stubbed() as (stub, service):
        training = service.create_lora_training_client("stub/model", rank=8).result()
        before = len(stub.log)
        with pytest.raises(InvalidInputError, match=said):
            made(service, training)
        assert len(stub.log) == before


def test_calls_held_until_the_model_exists_keep_their_order() -> None:
    with stubbed() as (stub, service):
        release: threading.Event = stub.hold("/create_model")
        training = service.create_lora_training_client("stub/model", rank=8)
        stub.script("/new_call", Answer(body={"request_id": "req-0"}))
        first = training.request("/api/v1/new_call", {"x": 1})
        second = training.optim_step(STEP)
        release.set()
        second.result()
        first.exception()
        assert stub.asked("/new_call")[0].json()["seq_id"] == 1
        assert stub.asked("/optim_step")[0].json()["seq_id"] == 2
