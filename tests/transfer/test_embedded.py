"""Downloads and uploads of real weights against the embedded server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.raising import refuse_threads
from support.servers import unused_port

import tinker_sync
from tinker_sync import types
from tinker_sync.clients.rest import RestClient
from tinker_sync.errors import TinkerError
from tinker_sync.local.tiny import NAME as BASE
from tinker_sync.testing import FaultPlan, LocalServer
from tinker_sync.transport.files.signed import SignedHttp

pytestmark = pytest.mark.filterwarnings("ignore::tinker_sync.errors.ExperimentalWarning")
LORA = types.LoraConfig(rank=4)


@pytest.fixture
def service() -> Iterator[tinker_sync.ServiceClient]:
    with LocalServer() as server, server.service() as service:
        yield service


def test_every_kind_of_checkpoint_downloads(tmp_path: Path, service: tinker_sync.ServiceClient) -> None:
    rest = RestClient(service.holder)
    trainer = service.create_lora_training_client(BASE, rank=4).result()
    example = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    trainer.forward_backward([example], "cross_entropy")
    trainer.optim_step(tinker_sync.AdamParams(learning_rate=0.01)).result(120)
    paths = [
        trainer.save_state("state").result(120).path,
        trainer.save_weights_for_sampler("sampler").result(120).path,
        trainer.save_weights_external("export").result(120).path,
    ]
    weights = []
    for path in paths:
        got = rest.download_checkpoint(path, tmp_path / path.rpartition("/")[2]).result(120)
        names = [file.name for file in got.files]
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names)
        assert [file.size_bytes for file in got.files] == [(got.path / name).stat().st_size for name in names]
        weights.append((got.path / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1] == weights[2]
    # The download deletes the export it made of the training checkpoint.
    kept = {entry.tinker_path for entry in rest.iter_user_checkpoints()}
    assert kept == set(paths)


def test_files_of_the_server_on_this_machine_come_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with tinker_sync.ServiceClient(base_url="local") as service, unused_port() as port:
        settings = service.holder.settings
        service.get_server_capabilities()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        http = SignedHttp(settings)
        with http.get(f"{settings.base_url}/api/v1/healthz", {}) as answer:
            assert answer.status == 200
        http.close()


def test_download_can_be_uploaded_again(tmp_path: Path, service: tinker_sync.ServiceClient) -> None:
    rest = RestClient(service.holder)
    trainer = service.create_lora_training_client(BASE, rank=4).result()
    path = trainer.save_weights_external("export").result(120).path
    first = rest.download_checkpoint(path, tmp_path / "first").result(120)
    back = rest.upload_external_weights(first.path, BASE, LORA).result(120)
    second = rest.download_checkpoint(back, tmp_path / "second").result(120)
    for name in ("adapter_model.safetensors",):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()
    found = rest.search_checkpoints(types.CheckpointSearchRequest()).result(120)
    assert {path, back} <= {entry.tinker_path for entry in found.checkpoints}
    assert {entry.base_model for entry in found.checkpoints} == {BASE}


def test_without_a_thread_the_future_of_a_transfer_fails(
    tmp_path: Path, service: tinker_sync.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = RestClient(service.holder)
    with monkeypatch.context() as patch:
        refuse_threads(patch, "tinker-transfer")
        futures = [
            rest.download_checkpoint("tinker://run/weights/a", tmp_path / "a"),
            rest.upload_external_weights(tmp_path, BASE, LORA),
        ]
    for future in futures:
        with pytest.raises(TinkerError, match="no thread"):
            future.result(120)


def test_close_waits_for_an_upload(tmp_path: Path) -> None:
    plan = FaultPlan().latency("external_weights_upload_finish", 0.5)
    with LocalServer(plan) as server:
        service = server.service()
        rest = service.create_rest_client()
        trainer = service.create_lora_training_client(BASE, rank=4)
        path = trainer.save_weights_external("export").result(120).path
        files = rest.download_checkpoint(path, tmp_path / "files").result(120).path
        uploaded = rest.upload_external_weights(files, BASE, LORA)
        service.close().result(120)
        assert uploaded.result(0).startswith("tinker://")


def test_interrupted_export_is_reused(
    tmp_path: Path, service: tinker_sync.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second attempt to download uses the export that the first attempt made."""
    rest = RestClient(service.holder)
    trainer = service.create_lora_training_client(BASE, rank=4).result()
    path = trainer.save_state("state").result(120).path

    replace = os.replace

    def fail_at_the_end(source: Path, target: Path) -> None:
        if target == tmp_path / "out":
            raise OSError(5, "at the last moment")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", fail_at_the_end)
        with pytest.raises(tinker_sync.TransferError, match="last moment"):
            rest.download_checkpoint(path, tmp_path / "out").result(120)
    exports = [kept for kept in paths_of(rest) if "external_weights" in kept]
    assert len(exports) == 1
    assert exports[0] in (tmp_path / "out.partial" / "download.json").read_text()
    assert rest.download_checkpoint(path, tmp_path / "out").result(120).bytes_resumed > 0
    assert paths_of(rest) == [path]


def paths_of(rest: RestClient) -> list[str]:
    return [entry.tinker_path for entry in rest.iter_user_checkpoints()]
