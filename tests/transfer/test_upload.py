"""Uploads send every file completely, and send nothing outside the directory."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.clock import FakeClock
from support.file_server import FileServer

import tinker_sync
from tinker_sync import errors, types
from tinker_sync._base.secret import HeaderMap
from tinker_sync.clients.rest import RestClient
from tinker_sync.transport.files import upload as transfer_upload
from tinker_sync.transport.files.progress import ProgressReporter, TransferProgress
from tinker_sync.transport.files.signed import Cancellation, SignedHttp, SignedResponse

LORA = types.LoraConfig(rank=8)
FILES = {"adapter_model.safetensors": os.urandom(700_000), "adapter_config.json": b"{}"}
pytestmark = pytest.mark.filterwarnings("ignore::tinker_sync.errors.ExperimentalWarning")


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKER_PACE", "0.001")
    place = tmp_path / "weights"
    place.mkdir()
    for name, content in FILES.items():
        (place / name).write_bytes(content)
    return place


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer(dict.fromkeys(FILES, 0)) as server:
        yield server


def send(server: FileServer, place: Path, **options: Any) -> str:
    with tinker_sync.ServiceClient(base_url=server.url, api_key="tml-mine-alone") as service:
        return (
            RestClient(service.holder).upload_external_weights(place, "org/base", LORA, **options).result(120)
        )


class States:
    """A progress listener that keeps the latest state. `last` waits until the upload is done."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._last: TransferProgress

    def __call__(self, state: TransferProgress) -> None:
        self._last = state
        if state.stage == "done":
            self._done.set()

    def last(self) -> TransferProgress:
        assert self._done.wait(120)
        return self._last


def test_a_file_that_is_accepted_before_its_end_is_sent_again(
    server: FileServer, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server kept a part of the file, and the upload succeeded."""
    whole, cut = SignedHttp.put, []

    def put(http: SignedHttp, url: str, body: Any, size_bytes: int) -> SignedResponse:
        if cut:
            return whole(http, url, body, size_bytes)
        cut.append(body.read(1))
        return whole(http, url, io.BytesIO(cut[0]), 1)  # the answer comes after the first byte

    monkeypatch.setattr(SignedHttp, "put", put)
    states = States()
    send(server, weights, progress=states)
    assert server.puts == FILES
    assert states.last().interruptions == 1


def test_all_files_are_uploaded(server: FileServer, weights: Path) -> None:
    states = States()
    path = send(server, weights, destination_project_id="p-1", progress=states)
    last = states.last()
    assert server.puts == FILES
    assert path == "tinker://run/external_weights/up-0"
    start = next(seen for seen in server.seen if seen.path.endswith("_start")).start
    assert (start["base_model"], start["lora_config"]["rank"], start["destination_project_id"]) == (
        "org/base",
        8,
        "p-1",
    )
    assert (last.bytes_done, last.bytes_total, last.files_done) == (700_002, 700_002, 2)
    for put in server.asked():
        assert "tml-mine-alone" not in str(put.headers)
        allowed = {"host", "user-agent", "accept-encoding", "content-length"}
        assert {name.lower() for name in put.headers} <= allowed


@pytest.mark.parametrize("trouble", [{"cut": 900_000, "sent": 500_000}, {"statuses": [503, 500]}])
def test_interrupted_file_is_sent_again(server: FileServer, weights: Path, trouble: dict[str, Any]) -> None:
    for name, value in trouble.items():
        setattr(server, name, value)
    states = States()
    assert send(server, weights, progress=states)
    assert server.puts == FILES
    assert len(server.asked()) > 2
    last = states.last()
    assert last.bytes_done == last.bytes_total == 700_002


def test_the_pause_that_the_server_asks_for_is_kept(tmp_path: Path) -> None:
    class Answer:
        def __init__(self, status: int, **headers: str) -> None:
            self.status = status
            self.headers = HeaderMap({name.replace("_", "-"): value for name, value in headers.items()})

        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *_: object) -> None: ...

    (tmp_path / "a").write_bytes(b"weights")
    answers = [Answer(503, retry_after="7"), Answer(200)]

    def put(_url: str, body: Any, size: int) -> Answer:
        assert len(body.read(size)) == size
        return answers.pop(0)

    http: Any = SimpleNamespace(put=put)
    clock, start = FakeClock(), TransferProgress(tinker_path="", stage="preparing")
    sender = transfer_upload.DirectoryUpload(
        tmp_path,
        http,
        clock=clock,
        cancellation=Cancellation(),
        reporter=ProgressReporter(None, lambda job: job(), clock, start),
    )
    assert sender.run(lambda: ("up-1", {"a": "http://files/a"})) == "up-1"
    (pause_s,) = clock.waits
    assert pause_s >= 7.0


def test_expired_addresses_begin_a_new_upload(server: FileServer, weights: Path) -> None:
    server.statuses = [403]
    assert send(server, weights) == "tinker://run/external_weights/up-2"
    assert server.puts == FILES


def test_refusing_server_fails_the_upload(server: FileServer, weights: Path) -> None:
    server.statuses = [507]
    with pytest.raises(errors.TransferError, match="507"):
        send(server, weights)
    server.life_s = -5
    with pytest.raises(errors.TransferError, match="refused at each attempt") as caught:
        send(server, weights)
    assert "s3cr3t" not in str(caught.value)
    server.life_s, server.statuses = 60, [503] * 20
    with pytest.raises(errors.TransferError, match="503"):
        send(server, weights)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "link/outside"])
def test_files_outside_the_directory_are_refused(weights: Path, name: str) -> None:
    (weights.parent / "outside").write_text("private")
    (weights / "link").symlink_to(weights.parent)
    with FileServer({name: 0}) as server, pytest.raises(errors.TransferError):
        send(server, weights)
    assert server.asked() == []


def test_all_missing_files_are_named(weights: Path) -> None:
    with FileServer({"x.bin": 0, "y.bin": 0, "adapter_config.json": 0}) as server:
        with pytest.raises(errors.InvalidInputError) as caught:
            send(server, weights)
        assert [problem.split("'")[1] for problem in caught.value.problems] == ["x.bin", "y.bin"]
        assert server.asked() == []
        with pytest.raises(errors.InvalidInputError):
            send(server, weights / "nowhere")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file: file.write_bytes(b"x" * 700_001), "has changed since the upload began"),
        (lambda file: file.write_bytes(b"x"), "has changed since the upload began"),
        (lambda file: file.unlink(), "cannot be read: No such file"),
    ],
)
def test_a_file_that_changes_during_the_upload_fails_it(
    server: FileServer,
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], object],
    complaint: str,
) -> None:
    put, changed = SignedHttp.put, threading.Event()

    def put_and_change(self: SignedHttp, url: str, body: Any, size_bytes: int) -> SignedResponse:
        if not changed.is_set():  # this is the first file
            change(weights / "adapter_model.safetensors")
            changed.set()
        return put(self, url, body, size_bytes)

    monkeypatch.setattr(SignedHttp, "put", put_and_change)
    with pytest.raises(errors.TransferError, match=f"adapter_model.safetensors: it {complaint}"):
        send(server, weights)
    assert list(server.puts) == ["adapter_config.json"]


CALLS: list[Callable[[RestClient], Any]] = [
    lambda rest: rest.search_checkpoints(types.CheckpointSearchRequest()),
    lambda rest: rest.external_weights_upload_start(base_model="org/base", lora_config=LORA),
    lambda rest: rest.external_weights_upload_finish("up-1"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [404, 405, 501])
def test_missing_call_is_reported(status: int, call: Callable[[RestClient], Any]) -> None:
    from support.tinker_stub import Answer, StubServer

    with StubServer() as stub:
        stub.script("*", *[Answer(usual=True)] * 2, Answer(status, {"detail": "Not Found"}))
        with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-a") as service:  # type: ignore[attr-defined]
            rest = RestClient(service.holder)
            with pytest.warns(errors.ExperimentalWarning):
                future = call(rest)
            with pytest.raises(errors.UnsupportedByServerError, match="does not offer"):
                future.result(120)


def test_experimental_calls() -> None:
    from support.tinker_stub import Answer, StubServer

    cursor = {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "u"}
    entry = {
        "checkpoint_id": "weights/a",
        "checkpoint_type": "training",
        "time": "2026-01-01T00:00:00Z",
        "tinker_path": "tinker://r/weights/a",
        "base_model": "org/base",
    }
    with StubServer() as stub:
        stub.script("/checkpoints/search", Answer(body={"checkpoints": [entry], "next_cursor": cursor}))
        stub.script("/external_weights_upload_finish", Answer(403, {"detail": "not for you"}))
        with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-a") as service:  # type: ignore[attr-defined]
            rest = RestClient(service.holder)
            found = rest.search_checkpoints(types.CheckpointSearchRequest(base_models=["org/base"])).result(
                20
            )
            with pytest.raises(errors.PermissionDeniedError):
                rest.external_weights_upload_finish("up-1").result(120)
            with pytest.raises(errors.InvalidInputError):
                rest.external_weights_upload_finish("")
        asked = json.loads(stub.asked("/checkpoints/search")[0].body)
    assert (asked["base_models"], asked["owner"], asked["limit"]) == (["org/base"], {"type": "own"}, 50)
    assert found.checkpoints[0].base_model == "org/base"
    assert found.next_cursor is not None
    assert found.checkpoints[0].model_dump()["base_model"] == "org/base"
