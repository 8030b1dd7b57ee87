"""The application: its calls, keys and tokens, and the answers to invalid requests."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.embedded import BASE, KEY, PROTO, Running, pass_body, running
from support.values import for_each

from tinker_sync.errors import ConfigurationError
from tinker_sync.local.engine.host import Host
from tinker_sync.local.server.app import build
from tinker_sync.local.server.state import Flags
from tinker_sync.local.store import Store
from tinker_sync.wire import zstd
from tinker_sync.wire.dialect import Dialect, read_probe
from tinker_sync.wire.endpoints import ENDPOINTS, NEWER


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("door"), max_body_bytes=200_000, hold_s=0.05) as made:
        yield made


def paths() -> list[tuple[str, str]]:
    found = []
    for row in (*ENDPOINTS.values(), *NEWER.values()):
        ids = {name: "weights/x" if name == "checkpoint" else "x" for name in row.path.names}
        found.append((row.method, row.path_for(**ids)))
    return found


WRONG_KEYS = ("", "tml-wrong", KEY + "x", "eyJhbGciOiJub25lIn0.eyJleHAiOjk5OTk5OTk5OTl9.")


@for_each(("method", "path"), [row for row in paths() if not row[1].endswith("/healthz")])
def test_every_call_needs_the_key(server: Running, method: str, path: str) -> None:
    for key in WRONG_KEYS:
        reply = server.ask(method, path, b"{}", {"X-API-Key": key})
        assert (reply.status, "key" in str(reply.detail)) == (401, True), reply
        assert "www-authenticate" not in reply.headers


def test_health_needs_no_key_and_reveals_nothing_without_one(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.session(colour="red")
        for key in WRONG_KEYS:
            reply = server.ask("GET", "/healthz", None, {"X-API-Key": key})
            assert (reply.status, reply.json()) == (200, {"status": "ok"})
        ignored = ["CreateSessionRequest.colour"]
        assert server.get("/healthz").json() == {"status": "ok", "ignored_fields": ignored}


def test_a_refused_token_is_named_as_the_reason_by_servers_that_exchange_them(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock=clock, token_life_s=60, pjwt_auth_enabled=True) as server:
        token = server.ok("/auth/token", {})["jwt"]
        clock.advance(61)
        reply = server.get("/sessions", X_API_Key=token)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, 'Bearer error="invalid_token"')
        reply = server.get("/sessions", X_API_Key="tml-wrong")  # no token, so a new one would not help
        assert (reply.status, "www-authenticate" in reply.headers) == (401, False)


@for_each(("method", "path"), paths())
def test_nonsense_is_safe(server: Running, method: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    bodies = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"nobody": 1}', b"[" * 500, b'{"type": {"a": []}}']
    for body in bodies:
        reply = server.ask(method, path, body, {"Content-Type": "application/json"})
        assert reply.status < 500, reply
        if reply.status >= 400:
            assert reply.detail
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_bodies_that_do_not_fit_are_refused_with_the_place(server: Running) -> None:
    body = {
        "sampling_params": {"top_p": 3},
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": ["x"]}]},
    }
    reply = server.post("/asample", body)
    assert reply.status == 422
    places = [entry["loc"] for entry in reply.detail]
    assert all(place[0] == "body" for place in places)
    chunk = {"type": "video", "tokens": [1]}
    reply = server.post("/asample", {"sampling_params": {}, "prompt": {"chunks": [chunk]}})
    assert reply.status == 422
    assert "expected one of 'encoded_text', 'image_asset_pointer'" in str(reply.detail)
    reply = server.post(
        "/save_weights_for_sampler", {"model_id": "m", "sampling_session_seq_id": 0, "kind": "x"}
    )
    assert reply.status == 422
    assert "expected one of 'snapshot', 'inflight', got 'x'" in str(reply.detail)
    reply = server.post("/forward_backward", b"\x0a\xff", content_type=PROTO)
    assert reply.status == 422


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/create_session", {"tags": ["a", "\ud800"], "sdk_version": "1"}, ["body", "tags", 1]),
        ("/create_session", {"tags": [], "sdk_version": "1", "user_metadata": {"\udfff": 1}}, None),
        ("/session_heartbeat", {"session_id": "\ud83d"}, ["body", "session_id"]),
        ("/create_sampling_session", {"model_path": "tinker://\ud800/weights/a"}, ["body", "model_path"]),
        ("/weights_info", {"tinker_path": "tinker://\ud800/weights/a"}, ["body", "tinker_path"]),
    ],
)
def test_half_a_character_is_refused_with_its_place(
    server: Running, path: str, body: dict[str, object], place: list[object] | None
) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.detail[0]["loc"]) == (422, place or ["body", "user_metadata"])
    assert "half of a surrogate pair" in reply.detail[0]["msg"]


def test_a_call_during_the_shutdown_is_asked_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing() -> None:
        pass

    with running(tmp_path) as server:
        service = server.app.service
        asyncio.run_coroutine_threadsafe(service.close(), service.loop).result(PATIENCE_S)
        monkeypatch.setattr(service, "close", nothing)  # at the end of the block
        assert [server.get(path).status for path in ("/sessions", "/checkpoints")] == [503, 503]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_other_paths_and_methods(server: Running) -> None:
    assert server.get("/nowhere").status == 404
    assert server.ask("GET", "/").status == 404
    assert server.ask("DELETE", "/create_session").status == 405
    assert server.ask("PUT", "/training_runs").status == 405


@pytest.mark.parametrize(
    "path", ["/training_runs/..%2F..%2Fetc", "/training_runs/a/checkpoints/weights/..%2Fx"]
)
def test_no_path_leads_out_of_the_data_directory(server: Running, path: str) -> None:
    """An id in a request that contains `../` is refused, so no path leads out of the data directory."""
    assert server.ask("DELETE" if "weights" in path else "GET", path).status in (400, 404)


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        (
            "zstd",
            lambda body: zstd.compress([body], len(body)) if zstd.is_available() else pytest.skip("no zstd"),
        ),
    ],
)
def test_packed_bodies(server: Running, coding: str, pack: object) -> None:
    body = json.dumps({"sdk_version": "0.36.0"}).encode()
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    assert callable(pack)
    assert server.ask("POST", "/client/config", pack(body), headers).status == 200
    bomb = pack(b" " * 500_000 + body)
    assert len(bomb) < 100_000
    assert server.ask("POST", "/client/config", bomb, headers).status == 413
    assert server.ask("POST", "/client/config", pack(body)[:-3], headers).status in (400, 422)
    assert server.ask("POST", "/client/config", b"not packed", headers).status == 400


@pytest.mark.usefixtures("without_zstd")
def test_compression_without_decoder_is_not_offered(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        reply = server.ask("POST", "/client/config", b"x", {"Content-Encoding": "zstd"})
        assert (reply.status, "zstandard" in reply.detail) == (415, True)
        with pytest.raises(ConfigurationError, match="zstandard"):
            build(server.store, Host([]), key=KEY, flags=Flags.of(proto_compress_fwdbwd=True))


def test_telemetry_is_dropped_and_health_reported(server: Running) -> None:
    assert server.ok("/telemetry", {"events": [], "session_id": "s"}) == {"status": "accepted"}
    assert server.get("/healthz").json()["status"] == "ok"


def test_settings_are_published(tmp_path: Path) -> None:
    with running(tmp_path, fwdbwd_max_chunk_len=7, refresh_interval_sec=11, seed=0) as server:
        asked = {"sdk_version": "0.36.0"}
        config, dynamic = server.ok("/client/config", asked), server.ok("/client/dynamic_config", asked)
    assert len(config) == 17
    assert "create_model_via_load_weights" not in config
    assert (config["fwdbwd_max_chunk_len"], dynamic["refresh_interval_sec"]) == (7, 11)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="fwdbwd_max_chunk_length"):
        Flags.of(fwdbwd_max_chunk_length=7)


def test_a_server_without_a_key_is_not_made(tmp_path: Path) -> None:
    with Store(tmp_path) as store, pytest.raises(ConfigurationError, match="key"):
        build(store, Host([]), key="")


def test_tokens_stand_for_the_key_until_they_expire(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock=clock, token_life_s=60) as server:
        token = server.ok("/auth/token", {})["jwt"]
        assert server.get("/sessions", X_API_Key=token).status == 200
        head, payload, mac = token.split(".")
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        assert claims["exp"] == claims["iat"] + 60
        longer = base64.urlsafe_b64encode(json.dumps({**claims, "exp": 10**12}).encode()).decode().rstrip("=")
        for forged in (f"{head}.{longer}.{mac}", f"{head}.{payload}.", token[:-2]):
            assert server.get("/sessions", X_API_Key=forged).status == 401
        clock.advance(61)
        assert server.get("/sessions", X_API_Key=token).status == 401
        key = server.get("/auth/apikey/me").json()
        assert (key["key_id"], key["name"]) == (1, "local")
        assert server.ask("DELETE", "/auth/apikey/me").status == 403


# ------------------------------------------------------------------------------------------ the older kind
def test_an_older_server_has_no_newer_calls(tmp_path: Path) -> None:
    dialect = Dialect.forced("json")
    with running(tmp_path, json_only=True) as server:
        for row in ENDPOINTS.values():
            ids = {name: "weights/x" if name == "checkpoint" else "x" for name in row.path.names}
            reply = server.ask(row.method, row.path_for(**ids), b"{}")
            offered = dialect.offers(row.name) and row.name not in ("client_config", "dynamic_config")
            assert (
                reply.status in (404, 405) and reply.detail in ("Not Found", "Method Not Allowed")
            ) != offered, row
        probe = server.post("/forward_backward", b"\n\x05probe", content_type=PROTO)
        assert read_probe(probe.status, probe.body) == "json"


def test_an_older_server_answers_in_json_and_fails_with_a_status(tmp_path: Path) -> None:
    with running(tmp_path, json_only=True) as server:
        model = server.model(server.session())
        data = [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}},
            }
        ]
        asked = {"model_id": model, "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}
        promise = server.ok("/forward_backward", asked)
        reply = server.retrieve(promise["request_id"], accept=PROTO)
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["loss_fn_outputs"][0]["logprobs"]["dtype"] == "float32"
        forward = {"model_id": model, "forward_input": {"data": data, "loss_fn": "cross_entropy"}}
        assert server.result_of("/forward", forward)["metrics"]["loss:sum"] > 0
        wrong = {**asked, "forward_backward_input": {"data": data, "loss_fn": "none"}}
        failed = server.retrieve(server.ok("/forward_backward", wrong)["request_id"])
        assert (failed.status, "'none'" in failed.detail) == (400, True)
        sampler = server.sampler(server.session()).json()["sampling_session_id"]
        assert "sample_sequence_ids" not in server.sample(sampler, 0)


# ------------------------------------------------------------------------------------------ newer clients
def test_each_unknown_field_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path) as server, caplog.at_level(logging.WARNING, "tinker_sync.local"):
        session = server.session(colour="red")
        for number in range(3):
            server.session(colour="blue")
            server.create_model(session, number, lora_config={"rank": 2, "taste": 1, "new\nline": 2})
        body = pass_body(f"{session}:train:0", 1) + bytes.fromhex("980101")
        assert server.post("/forward_backward", body, content_type=PROTO).status == 200
        ignored = server.get("/healthz").json()["ignored_fields"]
    names = ["CreateSessionRequest.colour", "ForwardBackwardRequest.19", "LoraConfig.taste"]
    assert ignored == sorted([*names, r"LoraConfig['new\nline']"])
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [f"ignored {name}: this server does not know the field" for name in ignored]


def test_values_of_known_fields_are_checked_as_before(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        session = server.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "colour": 1}
        reply = server.post("/create_model", {**body, "lora_config": {"rank": "many", "taste": 1}})
        assert (reply.status, "lora_config.rank" in str(reply.detail)) == (422, True)
        reply = server.post("/create_model", {**body, "optimizer_config": {"type": "sgd", "colour": 1}})
        assert (reply.status, "'sgd' is not computed" in reply.detail) == (400, True)
