"""Checkpoints over HTTP: saving, lists, search, changes, downloads and uploads, also after a restart."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock
from support.embedded import API, BASE, Reply, Running, running

from tinker_sync.local.engine import safetensors


def train(server: Running, session: str, number: int = 0) -> str:
    model = server.model(session, number)
    learn(server, model, 1)
    return model


def save(server: Running, model: str, seq_id: int, name: str, **more: Any) -> Any:
    body = {"model_id": model, "path": name, "seq_id": seq_id, **more}
    return server.result_of("/save_weights", body)


def publish(server: Running, model: str, seq_id: int, name: str = "latest", **more: Any) -> str:
    """Save a checkpoint for sampling, and return its path."""
    body = {"model_id": model, "path": name, "seq_id": seq_id, **more}
    path: str = server.result_of("/save_weights_for_sampler", body)["path"]
    return path


def learn(server: Running, model: str, seq_id: int) -> None:
    server.pass_(model, seq_id)
    server.optim(model, seq_id + 1, learning_rate=0.05)


def urls_of_export(server: Running, model: str) -> Any:
    place = f"/training_runs/{model}/checkpoints/external_weights/out"
    return server.get(f"{place}/external_weights_urls").json()


def export(server: Running, model: str, seq_id: int, name: str, **more: Any) -> Any:
    body = {"model_id": model, "path": name, "seq_id": seq_id, **more}
    return server.result_of("/save_weights_external", body)


def loss(server: Running, model: str, seq_id: int) -> float:
    request = server.pass_(model, seq_id, forward_only=True).json()["request_id"]
    return server.output(request).metrics["loss:sum"]


def fetch(server: Running, url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Reply:
    """Send a request to a signed address, without the key."""
    path = url.partition(str(server.port))[2]
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.ask(method, path, body, {"X-API-Key": "", **named})


# ------------------------------------------------------------------------------------------ saving
def test_a_model_goes_on_from_a_checkpoint_of_another_server(tmp_path: Path) -> None:
    with running(tmp_path, seed=1) as server:
        model = train(server, server.session())
        path = save(server, model, 3, "last")["path"]
        wanted = loss(server, model, 4)
        learn(server, model, 5)
        further = loss(server, model, 7)
        old_promise = server.pass_(model, 8).json()["request_id"]
        old_session = model.partition(":")[0]
    with running(tmp_path, seed=1) as server:
        assert server.retrieve(old_promise).status == 410
        assert "not in memory" in server.pass_(model, 9).detail
        assert server.ok("/get_info", {"model_id": model})["lora_rank"] == 2
        assert server.ok("/session_heartbeat", {"session_id": old_session})["type"] == "session_heartbeat"
        body = {"session_id": server.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        made = server.result_of("/load_weights", body)
        again = made["model_id"]
        assert loss(server, again, 1) == wanted
        learn(server, again, 2)
        assert loss(server, again, 4) == further


def test_samplers_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, seed=1) as server:
        session = server.session()
        model = train(server, session)
        path = publish(server, model, 3, "s")
        unsaved = {"model_id": model, "sampling_session_seq_id": 0, "seq_id": 4}
        made = server.result_of("/save_weights_for_sampler", unsaved)
        ephemeral = made["sampling_session_id"]
        sampler = server.sampler(session, 1, model_path=path).json()["sampling_session_id"]
        params = {"max_tokens": 8, "seed": 2}
        found = [server.sampled(each, 0, params=params) for each in (ephemeral, sampler)]
        assert found[0]["sequences"][0]["tokens"] == found[1]["sequences"][0]["tokens"]
        assert server.get(f"/samplers/{ephemeral}").json().get("model_path") is None
    with running(tmp_path, seed=1) as server:
        again = server.sampled(sampler, 0, params=params)
        assert again["sequences"][0]["tokens"] == found[1]["sequences"][0]["tokens"]
        body = {"sampling_session_id": ephemeral, "prompt": {"chunks": []}, "sampling_params": {}}
        reply = server.post("/asample", body)
        assert (reply.status, "never saved" in reply.detail) == (410, True)


def test_a_load_right_behind_a_save_finds_it(server: Running) -> None:
    """A load finds the checkpoint of a save, although it is sent before the save has a result."""
    model = train(server, server.session())
    server.ok("/save_weights", {"model_id": model, "path": "here", "seq_id": 3})
    wanted = server.pass_(model, 4, forward_only=True).json()["request_id"]
    server.pass_(model, 5)
    server.optim(model, 6, learning_rate=1.0)
    body = {"model_id": model, "path": f"tinker://{model}/weights/here", "optimizer": True, "seq_id": 7}
    server.ok("/load_weights", body)
    assert loss(server, model, 8) == server.output(wanted).metrics["loss:sum"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"path": "../../etc/passwd"}, "cannot name"),
        ({"path": "a/b"}, "cannot name"),
        ({"path": ".."}, "cannot name"),
        ({"path": "x" * 300}, "cannot name"),
        ({"path": "fine", "ttl_seconds": 3599}, "ttl_seconds"),
        ({"path": "fine", "ttl_seconds": 10**10}, "ttl_seconds"),
    ],
)
def test_saves_that_are_refused(server: Running, more: dict[str, Any], says: str) -> None:
    model = server.model(server.session())
    for call in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        body = {"model_id": model, "seq_id": 1 if call == "save_weights" else None, **more}
        body = {name: value for name, value in body.items() if value is not None}
        failed = server.result_of(f"/{call}", body)
        assert (failed["category"], says in failed["error"]) == ("user", True), failed
    assert server.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"] == []


def test_names_are_taken_once_unless_overwritten(server: Running) -> None:
    model = train(server, server.session())
    save(server, model, 3, "a", user_metadata={"n": "1"})
    failed = save(server, model, 4, "a")
    assert failed["category"] == "user"
    assert "already has a training checkpoint a; replace it with overwrite=True" in failed["error"]
    save(server, model, 5, "a", overwrite=True, user_metadata={"n": "2"})
    listed = server.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [each["user_metadata"] for each in listed] == [{"n": "2"}]


@pytest.mark.parametrize(
    ("lora", "says"),
    [({"rank": 3}, "rank 2, the model 3"), ({"rank": 2, "train_mlp": False}, "train_mlp True")],
)
def test_a_checkpoint_of_another_shape(server: Running, lora: dict[str, Any], says: str) -> None:
    model = train(server, server.session())
    path = save(server, model, 3, "a")["path"]
    other = server.model(server.session(), lora_config=lora)
    body = {"model_id": other, "path": path, "optimizer": False, "seq_id": 1}
    failed = server.result_of("/load_weights", body)
    assert (failed["category"], says in failed["error"]) == ("user", True), failed


def test_no_optimizer_where_none_was_saved(server: Running) -> None:
    model = train(server, server.session())
    path = export(server, model, 3, "s")["path"]
    for seq_id, optimizer in ((4, True), (5, False)):
        body = {"model_id": model, "path": path, "optimizer": optimizer, "seq_id": seq_id}
        result = server.result_of("/load_weights", body)
        assert ("error" in result) is optimizer
    foreign = {"model_id": model, "path": path, "optimizer": False, "weights_access_token": "x", "seq_id": 6}
    assert "weights_access_token" in server.result_of("/load_weights", foreign)["error"]


def test_weights_of_samplers_and_of_trainings_do_not_stand_for_each_other(server: Running) -> None:
    session = server.session()
    model = train(server, session)
    state = save(server, model, 3, "a")["path"]
    sampled = publish(server, model, 4, "a")

    refused = server.sampler(session, 1, model_path=state)
    assert (refused.status, "is a checkpoint for training" in refused.detail) == (400, True), refused
    assert "save_weights_for_sampler" in refused.detail
    body = {"model_path": state, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
    refused = server.post("/asample", {**body, "sampling_params": {"max_tokens": 1}})
    assert (refused.status, "sampling_session_id" in refused.detail) == (422, True), refused

    into = {"model_id": model, "path": sampled, "optimizer": False, "seq_id": 5}
    failed = server.result_of("/load_weights", into)
    assert (failed["category"], "has weights for sampling only" in failed["error"]) == ("user", True), failed
    fresh = {"session_id": session, "model_seq_id": 7, "path": sampled, "optimizer": False}
    refused = server.post("/load_weights", fresh)
    assert (refused.status, "save_state" in refused.detail) == (400, True), refused
    # The refused calls changed nothing, and the right paths work.
    assert server.sampler(session, 2, model_path=sampled).status == 200
    again = server.result_of("/load_weights", {**fresh, "path": state})["model_id"]
    assert loss(server, again, 1) == loss(server, model, 6)


# ------------------------------------------------------------------------------------------ lists
def test_pages_and_searches(tmp_path: Path) -> None:
    with running(tmp_path, seed=1) as server:
        session = server.session(project_id="p-1", user_metadata={"team": "a"}, display_name="Night run")
        other = server.session(display_name="day")
        one, two = train(server, session), train(server, other)
        for number in range(3):
            save(server, one, 3 + number, f"c-{number}", user_metadata={"n": str(number)})
        publish(server, two, 3, "s")
        runs = server.get("/training_runs?limit=1&offset=1").json()
        assert ([each["training_run_id"] for each in runs["training_runs"]], runs["cursor"]) == (
            [one],
            {"offset": 1, "limit": 1, "total_count": 2},
        )
        mine = server.get("/training_runs?project_id=p-1").json()["training_runs"]
        assert [each["training_run_id"] for each in mine] == [one]
        assert mine[0]["last_checkpoint"]["checkpoint_id"] == "weights/c-2"
        page = server.get("/checkpoints?limit=2&offset=1").json()
        assert [each["checkpoint_id"] for each in page["checkpoints"]] == ["weights/c-2", "weights/c-1"]
        assert page["cursor"]["total_count"] == 4

        def found(**request: Any) -> list[str]:
            names: list[str] = []
            cursor = None
            while True:
                body = {**request, "limit": 2, **({"cursor": cursor} if cursor else {})}
                reply = server.ok("/checkpoints/search", body)
                names += [each["checkpoint_id"].partition("/")[2] for each in reply["checkpoints"]]
                cursor = reply.get("next_cursor")
                if cursor is None:
                    return names

        assert found() == ["s", "c-2", "c-1", "c-0"]
        assert found(checkpoint_type="training", base_models=[BASE]) == ["c-2", "c-1", "c-0"]
        assert found(project_ids=["p-1"], user_metadata={"n": "1"}) == ["c-1"]
        assert found(base_models=[]) == []
        assert found(project_ids=["default"]) == ["s"]  # the project that `search_sessions` shows
        of_default = server.get("/training_runs?project_id=default").json()["training_runs"]
        assert [each["training_run_id"] for each in of_default] == [two]
        storage = server.get("/billing/usage/checkpoints/current?project_id=default").json()["data"]
        assert [each["checkpoint_count"] for each in storage] == [1]
        sessions = server.ok("/sessions/search", {"display_name": "night", "statuses": [{"type": "active"}]})
        assert [each["session_id"] for each in sessions["sessions"]] == [session]
        assert sessions["sessions"][0]["checkpoints_count"] == 3
        assert server.get("/sessions?limit=1").json()["sessions"] == [other]
        assert server.get(f"/sessions/{session}").json()["training_run_ids"] == [one]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "offset=-1", "limit=100000000", "access_scope=everything"]
)
def test_pages_that_make_no_sense(server: Running, query: str) -> None:
    assert server.get(f"/training_runs?{query}").status == 422
    assert server.get("/audit?event_type=gossip").status == 422
    assert server.get("/audit?day=yesterday").status == 422


# ------------------------------------------------------------------------------------------ changes
def test_a_repeated_change_gets_the_answer_to_the_first_one(server: Running) -> None:
    model = train(server, server.session())
    save(server, model, 3, "a")
    place = f"/training_runs/{model}/checkpoints/weights/a"
    start = {"base_model": BASE, "lora_config": {"rank": 2}}
    requests: list[tuple[str, str, Any]] = [
        ("POST", f"{place}/publish", None),
        ("DELETE", f"{place}/publish", None),
        ("DELETE", place, None),
        ("POST", "/external_weights_upload_start", start),
        ("POST", "/unload_model", {"model_id": model}),
    ]
    for number, request in enumerate(requests):
        one, two = (server.ask(*request, {"X-Idempotency-Key": f"change {number}"}) for _ in range(2))
        assert (one.status, one.body) == (200, two.body), request
        if "unload" in request[1]:
            server.result(one.json()["request_id"])
            assert server.ask(*request, {"X-Idempotency-Key": f"change {number}"}).body == one.body
    assert server.ask("DELETE", place, None, {"X-Idempotency-Key": "other"}).status == 404


def test_checkpoints_are_published_kept_and_deleted(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock=clock, seed=1) as server:
        model = train(server, server.session())
        save(server, model, 3, "a", ttl_seconds=4000)
        place = f"/training_runs/{model}/checkpoints/weights/a"
        assert server.post(f"{place}/publish").status == 200
        assert server.post(f"{place}/publish").status == 409
        assert server.get(f"/training_runs/{model}").json()["last_checkpoint"]["public"] is True
        assert server.ask("DELETE", f"{place}/publish").status == 200
        assert server.ask("DELETE", f"{place}/publish").status == 409
        for ttl, status in ((1, 400), ("x", 400), (True, 400), (10**10, 400), (None, 200), (5000, 200)):
            assert server.ask("PUT", f"{place}/ttl", {"ttl_seconds": ttl}).status == status
        assert server.ask("PUT", f"{place}/ttl", {}).status == 422
        clock.advance(4999)
        assert server.post(f"{place}/publish").status == 200
        assert [each["checkpoints_count"] for each in server.ok("/sessions/search")["sessions"]] == [1]
        clock.advance(2)
        assert [each["checkpoints_count"] for each in server.ok("/sessions/search")["sessions"]] == [0]
        assert server.ask("DELETE", place).status == 404
        save(server, model, 4, "a")  # its name is free again
        assert server.ask("DELETE", place).status == 200
        assert server.ask("DELETE", place).status == 404
        assert server.ask("DELETE", f"/training_runs/{model}/checkpoints/nonsense/a").status in (400, 404)


def test_what_is_deleted_is_sampled_no_more(server: Running) -> None:
    session = server.session()
    model = train(server, session)
    path = publish(server, model, 3, "s")
    sampler = server.sampler(session, model_path=path).json()["sampling_session_id"]
    assert "sequences" in server.sampled(sampler, 0)
    assert server.ask("DELETE", f"/training_runs/{model}/checkpoints/sampler_weights/s").status == 200
    failed = server.sampled(sampler, 1)
    assert (failed["category"], "checkpoint s" in failed["error"]) == ("user", True), failed
    assert server.sampler(session, 1, model_path=path).status == 404


def test_a_copy_is_made_once(server: Running) -> None:
    model = train(server, server.session(project_id="p-1"))
    path = save(server, model, 3, "a")["path"]
    body = {"source_path": path, "destination_project_id": "p-2", "ttl_seconds": 4000}
    one, two = (server.ok("/copy_weights", body, X_Idempotency_Key="k-1") for _ in range(2))
    other = server.ok("/copy_weights", body, X_Idempotency_Key="k-2")
    assert one == two != other
    run = one["tinker_path"].split("/")[2]
    assert run in [
        each["training_run_id"]
        for each in server.get("/training_runs?project_id=p-2").json()["training_runs"]
    ]
    info = [server.ok("/weights_info", {"tinker_path": each}) for each in (path, one["tinker_path"])]
    assert info[0] == info[1]
    assert (info[0]["base_model"], info[0]["lora_rank"], info[0]["train_mlp"]) == (BASE, 2, True)
    session = server.session()
    to_session = {"source_path": path, "session_id": session, "model_seq_id": 3}
    assert server.ok("/copy_weights", to_session)["tinker_path"] == f"tinker://{session}:train:3/weights/a"
    assert server.post("/copy_weights", {"source_path": path}).status == 400
    assert server.post("/copy_weights", {**body, "source_path": "tinker://no/weights/x"}).status == 404
    assert server.post("/copy_weights", {**body, "weights_access_token": "tml-x"}).status == 400


# ------------------------------------------------------------------------------------------ downloads
def test_files_are_fetched_whole(server: Running) -> None:
    model = train(server, server.session())
    saved = export(server, model, 3, "out")
    told = urls_of_export(server, model)
    assert sorted(told["urls"]) == ["adapter_config.json", "adapter_model.safetensors"]
    url = told["urls"]["adapter_model.safetensors"]
    whole = fetch(server, url)
    assert whole.status == 200
    assert saved["size_bytes"] == sum(len(fetch(server, each).body) for each in told["urls"].values())
    digest = base64.b64encode(hashlib.sha256(whole.body).digest()).decode()
    assert whole.headers["repr-digest"] == f"sha-256=:{digest}:"
    part = fetch(server, url, Range="bytes=100-199")  # which may be ignored
    assert (part.status, part.body) == (200, whole.body)
    head = fetch(server, url, "HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(whole.body)))


def test_addresses_are_genuine_and_expire(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock=clock, seed=1, url_life_s=60) as server:
        model = train(server, server.session())
        export(server, model, 3, "out")
        told = urls_of_export(server, model)
        assert datetime.fromisoformat(told["expires"].replace("Z", "+00:00")).timestamp() == clock.time() + 60
        url = told["urls"]["adapter_config.json"]
        assert fetch(server, url).status == 200
        for wrong in (
            url.partition("?")[0],
            url.replace("adapter_config.json", "adapter_model.safetensors"),
            url.replace("expires=1", "expires=2"),
            url[:-2],
        ):
            assert fetch(server, wrong).status == 403
        assert fetch(server, url, "PUT", b"x").status in (403, 404)
        assert fetch(server, url, "DELETE").status == 405
        clock.advance(61)
        assert fetch(server, url).status == 403


def test_archives_as_older_clients_fetch_them(server: Running) -> None:
    model = train(server, server.session())
    publish(server, model, 3, "s")
    for name in ("sampler_weights/s", "s"):
        told = server.get(f"/training_runs/{model}/checkpoints/{name}/archive")
        assert told.status == 302
        assert told.headers["expires"].endswith("GMT")
        reply = fetch(server, told.headers["location"])
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(reply.body))) as archive:
            assert archive.getnames() == ["adapter_config.json", "adapter_model.safetensors"]
            config = json.load(archive.extractfile("adapter_config.json"))  # type: ignore[arg-type]
        assert config["base_model_name_or_path"] == BASE
        assert fetch(server, told.headers["location"], range="bytes=1-9").body == reply.body  # as a whole
    assert server.get(f"/training_runs/{model}/checkpoints/none/archive").status == 404


# ------------------------------------------------------------------------------------------ uploads
@pytest.mark.parametrize("head", ["model.unembed_tokens", "lm_head"], ids=["theirs", "peft"])
def test_weights_from_elsewhere_are_sampled_and_trained_on(server: Running, head: str) -> None:
    model = train(server, server.session())
    export(server, model, 3, "out")
    wanted = loss(server, model, 4)
    urls = urls_of_export(server, model)
    content = {name: fetch(server, url).body for name, url in urls["urls"].items()}
    arrays = safetensors.read(content["adapter_model.safetensors"])
    renamed = {name.replace("model.unembed_tokens", head): array for name, array in arrays.items()}
    content["adapter_model.safetensors"] = b"".join(safetensors.pieces(renamed))
    start = {"base_model": BASE, "lora_config": {"rank": 2}, "destination_project_id": "p-9"}
    told = server.ok("/external_weights_upload_start", start)
    finish = {"upload_id": told["upload_id"]}
    assert "adapter_config.json" in server.post("/external_weights_upload_finish", finish).detail
    for name, url in told["urls"].items():
        assert fetch(server, url.replace("signature=", "signature=x"), "PUT", b"").status == 403
        assert fetch(server, url, "PUT", content[name]).status == 200
    one, two = (server.ok("/external_weights_upload_finish", finish)["tinker_path"] for _ in range(2))
    assert one == two
    assert fetch(server, next(iter(told["urls"].values())), "PUT", b"").status == 404
    body = {"session_id": server.session(), "model_seq_id": 0, "path": one, "optimizer": False}
    again = server.result_of("/load_weights", body)["model_id"]
    assert loss(server, again, 1) == wanted
    assert server.sampler(server.session(), model_path=one).status == 200


def in_bf16(content: bytes) -> bytes:
    """Return a safetensors file of float32 arrays with their upper 16 bits, as bfloat16."""
    arrays = safetensors.read(content)
    halves = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in arrays.items()}
    made = b"".join(safetensors.pieces(halves))
    size = int.from_bytes(made[:8], "little")
    header = made[8 : 8 + size].replace(b'"U16"', b'"BF16"')
    return len(header).to_bytes(8, "little") + header + made[8 + size :]


def test_weights_in_bfloat16_are_taken(server: Running) -> None:
    model = train(server, server.session())
    export(server, model, 3, "out")
    urls = urls_of_export(server, model)["urls"]
    told = server.ok("/external_weights_upload_start", {"base_model": BASE, "lora_config": {"rank": 2}})
    for name, url in told["urls"].items():
        content = fetch(server, urls[name]).body
        content = in_bf16(content) if name.endswith("safetensors") else content
        assert fetch(server, url, "PUT", content).status == 200
    path = server.ok("/external_weights_upload_finish", {"upload_id": told["upload_id"]})["tinker_path"]
    body = {"session_id": server.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    again = server.result_of("/load_weights", body)["model_id"]
    assert loss(server, again, 1) == pytest.approx(loss(server, model, 4), rel=0.01)


@pytest.mark.parametrize(
    ("rank", "damage", "says"), [(3, "", "r 3"), (2, "cut", "damaged"), (2, "other", "must be floats")]
)
def test_uploads_that_are_no_such_adapter(server: Running, rank: int, damage: str, says: str) -> None:
    more = {"lora_config": {"rank": 2, "train_mlp": damage != "other"}}
    model = server.model(server.session(), **more)
    export(server, model, 1, "out")
    urls = urls_of_export(server, model)
    told = server.ok("/external_weights_upload_start", {"base_model": BASE, "lora_config": {"rank": rank}})
    for name, url in told["urls"].items():
        content = fetch(server, urls["urls"][name]).body
        assert fetch(server, url, "PUT", content[:-9] if damage == "cut" else content).status == 200
    reply = server.post("/external_weights_upload_finish", {"upload_id": told["upload_id"]})
    assert (reply.status, says in reply.detail) == (400, True), reply


def test_paths_of_files_lead_nowhere_else(server: Running) -> None:
    service = server.app.service
    for path in ("external/../x/y", "external/a/b/c", "archive-nothing/a/b/c", "trace/nobody/a/b"):
        query, _ = service.signer.query(f"{API}/files/{path}", 60)
        reply = server.ask("GET", f"{API}/files/{path}?{query}", None, {"X-API-Key": ""})
        assert reply.status in (400, 404) or json.loads(reply.body)["traceEvents"] == []


# ------------------------------------------------------------------------------------------ replacements
def scores(server: Running, sampler: str) -> list[float]:
    """Return the log-probabilities of a fixed prompt, by which a test recognises the weights of a sampler."""
    found: list[float] = server.sampled(sampler, None, [5, 6, 7, 8], prompt_logprobs=True)["prompt_logprobs"]
    return found


def opened(server: Running, session: str, number: int, path: str) -> str:
    sampler: str = server.sampler(session, number, model_path=path).json()["sampling_session_id"]
    return sampler


@pytest.mark.parametrize("sampled_before", [True, False])
def test_a_replaced_sampler_checkpoint_stays_for_open_samplers(server: Running, sampled_before: bool) -> None:
    session = server.session()
    model = train(server, session)
    path = publish(server, model, 3, user_metadata={"n": "1"})
    kept = opened(server, session, 7, publish(server, model, 4, "other"))  # the same weights
    first = opened(server, session, 0, path)
    if sampled_before:
        scores(server, first)
    learn(server, model, 5)
    assert publish(server, model, 7, user_metadata={"n": "2"}) == path
    second = opened(server, session, 1, path)
    assert scores(server, first) == scores(server, kept) != scores(server, second)
    learn(server, model, 8)
    publish(server, model, 10)
    third = opened(server, session, 2, path)
    found = [scores(server, each) for each in (first, second, third)]
    assert found[0] == scores(server, kept)
    assert len({tuple(each[1:]) for each in found}) == 3
    listed = server.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["sampler_weights/latest", "sampler_weights/other"]


def test_a_model_made_out_of_a_checkpoint_can_be_looked_up_at_once(server: Running) -> None:
    """`get_info` describes a model whose weights are not loaded yet, because clients of 0.38 call it then."""
    model = train(server, server.session())
    path = save(server, model, 3, "here")["path"]
    session = server.session()
    body = {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": False}
    promise = server.ok("/load_weights", body)
    assert promise["model_id"] == f"{session}:train:5"
    info = server.ok("/get_info", {"model_id": promise["model_id"], "type": "get_info"})
    assert (info["model_id"], info["model_data"]["model_name"]) == (promise["model_id"], BASE)
    assert info["lora_rank"] == 2
    assert server.result(promise["request_id"])["model_id"] == promise["model_id"]
    assert server.ok("/get_info", {"model_id": promise["model_id"]}) == info


def test_a_repeated_request_gets_its_model_although_the_checkpoint_is_deleted(server: Running) -> None:
    session = server.session()
    model = train(server, session)
    path = save(server, model, 3, "a")["path"]
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    made = server.ok("/load_weights", body)
    assert server.result(made["request_id"])["model_id"] == f"{session}:train:1"
    assert server.ask("DELETE", f"/training_runs/{model}/checkpoints/weights/a").status == 200
    assert server.ok("/load_weights", body) == made
    assert server.post("/load_weights", {**body, "model_seq_id": 2}).status == 404


def test_a_name_that_is_used_again_after_a_deletion_does_not_change_open_samplers(server: Running) -> None:
    session = server.session()
    model = train(server, session)
    path = publish(server, model, 3)
    older = opened(server, session, 0, path)
    assert server.ask("DELETE", f"/training_runs/{model}/checkpoints/sampler_weights/latest").status == 200
    publish(server, model, 4)
    failed = server.sampled(older, None)
    assert (failed["category"], "saved anew" in failed["error"]) == ("user", True)
    assert scores(server, opened(server, session, 1, path))


def test_a_copy_does_not_take_the_number_of_a_model_in_memory(server: Running) -> None:
    session = server.session()
    path = save(server, train(server, session), 3, "a")["path"]
    unused = server.model(session, 1)
    body = {"source_path": path, "session_id": session, "model_seq_id": 1}
    assert server.post("/copy_weights", body).status == 409
    assert server.passed(unused, 1).metrics
