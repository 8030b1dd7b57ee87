"""The application: its calls, keys and tokens, and the answers to invalid requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.each import for_each
from support.embedded import API, KEY, PROTO, Running, pass_body, running

from tinker_sync.errors import ConfigurationError
from tinker_sync.local.engine.host import Host
from tinker_sync.local.server.app import HANDLERS, build
from tinker_sync.local.server.http import ServerThread
from tinker_sync.local.server.state import Flags
from tinker_sync.local.store import Store
from tinker_sync.testing._backends import Forward
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


def test_every_call_of_the_protocol_has_a_handler() -> None:
    assert set(HANDLERS) == {*ENDPOINTS, *NEWER}


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


def test_characters_of_two_halves_are_taken(server: Running) -> None:
    session = server.session(display_name="\U0001f600")  # JSON writes it as two escapes
    assert server.get(f"/sessions/{session}").json()["display_name"] == "\U0001f600"


_NINES = "9" * 5000


@for_each(
    ("path", "status"),
    [
        (f"/sessions?limit={_NINES}", 422),
        (f"/training_runs?offset={_NINES}", 422),
        ("/audit?day=9999-12-31", 200),
        ("/audit?day=0001-01-01", 200),
        ("/billing/usage/events?starting_on=0001-01-01T00:00%2B23:00&ending_before=0001-01-02T00:00Z", 400),
    ],
)
def test_numbers_and_moments_at_the_end_of_their_range(server: Running, path: str, status: int) -> None:
    assert server.get(path).status == status


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


def test_unknown_packing(server: Running) -> None:
    assert server.ask("POST", "/client/config", b"x", {"Content-Encoding": "br"}).status == 415


def test_large_bodies_are_refused_before_they_come(server: Running) -> None:
    reply = server.post("/telemetry", {"x": "y" * 300_000})
    assert reply.status == 413


def status_of_length(port: int, length: int) -> int:
    """Announce a body of some bytes. Return the status: 100 if the server waits for the body."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as line:
        head = f"POST {API}/telemetry HTTP/1.1\r\nContent-Length: {length}\r\n"
        line.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        return int(line.recv(100).split()[1])


@pytest.mark.parametrize("limit", [Flags().max_body_bytes, 1 << 40])
def test_the_setting_alone_limits_bodies(tmp_path: Path, limit: int) -> None:
    """The server receives some bodies over the limit, because it reads the number of a refused call."""
    with running(tmp_path, max_body_bytes=limit) as server:
        assert status_of_length(server.port, limit + 1) == 100
        assert status_of_length(server.port, limit + (1 << 28) + 1) == 413


def test_a_server_before_another_leaves_the_limit_of_bodies_to_it() -> None:
    with ServerThread(Forward(port=1)) as before:
        assert status_of_length(before.port, 1 << 30) == 100


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


def test_the_older_way_to_make_models_is_announced_where_it_is_asked_for(tmp_path: Path) -> None:
    with running(tmp_path, create_model_via_load_weights=True) as server:
        config = server.ok("/client/config", {"sdk_version": "0.36.0"})
    assert config["create_model_via_load_weights"] is True


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


def test_a_newer_server_knows_protobuf(server: Running) -> None:
    reply = server.post("/forward_backward", b"\n\x05probe", content_type=PROTO)
    assert reply.status == 404
    assert read_probe(reply.status, reply.body) == "protobuf"
    assert server.post("/forward_backward", pass_body("no-model", 1), content_type=PROTO).status == 404


def test_paths_begin_with_the_api(server: Running) -> None:
    assert server.ask("GET", f"{API}/healthz").status == 200
