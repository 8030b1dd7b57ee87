"""`base_url="local"` within one process: from the first request to the last client."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from support.clock import PATIENCE_S

from tinker_sync import (
    APIConnectionError,
    AuthenticationError,
    ConfigurationError,
    ServiceClient,
    _embedded,
)
from tinker_sync.config import Settings
from tinker_sync.local import launch
from tinker_sync.local.launch import EmbeddedServer

TINY = "tinker-sync/tiny"


@pytest.fixture(autouse=True)
def a_process_without_server() -> Iterator[None]:
    yield
    gc.collect()  # frees the clients of a failed test
    _embedded.stop_server()


def current() -> EmbeddedServer:
    server = _embedded.current_server()
    assert server is not None
    return server


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def await_stopped(server: EmbeddedServer) -> None:
    """Wait until another thread has stopped the server, because its last client was dropped."""
    never = Event()
    for _ in range(int(PATIENCE_S * 100)):
        if not server.running:
            return
        never.wait(0.01)
    raise AssertionError("the server still runs")


def test_clients_share_a_server_from_the_first_request_to_the_last_close() -> None:
    one, two = ServiceClient(base_url="local"), ServiceClient(base_url="local")
    server = current()
    assert not server.running
    assert not launch.locate(int(server.base_url.rpartition(":")[2])).exists()  # nothing was touched
    names = [model.model_name for model in one.get_server_capabilities().supported_models]
    assert names == [TINY]
    pid = server.pid
    assert pid is not None
    place = launch.locate(int(server.base_url.rpartition(":")[2]))
    two.get_server_capabilities()
    assert current() is server
    assert server.pid == pid
    one.close().result(PATIENCE_S)
    assert server.running
    sampler = two.create_sampling_client(base_model=TINY).result()
    assert sampler.get_base_model() == TINY
    two.close().result(PATIENCE_S)
    assert not server.running
    assert gone(pid)
    assert not place.exists()
    three = ServiceClient(base_url="local")
    assert three.get_server_capabilities().supported_models  # a new process
    assert current().pid != pid
    three.close().result(PATIENCE_S)


def test_a_dropped_client_lets_go() -> None:
    client = ServiceClient(base_url="local")
    client.get_server_capabilities()
    server = current()
    assert server.running
    del client
    gc.collect()
    await_stopped(server)


def test_the_key_stays_secret() -> None:
    with ServiceClient(base_url="local") as client:
        client.get_server_capabilities()
        server = current()
        key = server.key.reveal()
        place = launch.locate(int(server.base_url.rpartition(":")[2]))
        if Path("/proc/self/cmdline").exists():
            for name in ("cmdline", "environ"):
                assert key.encode() not in Path(f"/proc/{server.pid}/{name}").read_bytes()
        assert key not in (place / "server.log").read_text()
        if os.name != "nt":
            assert (place / "server.json").stat().st_mode & 0o077 == 0
            assert place.stat().st_mode & 0o077 == launch.open_root().stat().st_mode & 0o077 == 0
        for shown in (repr(server), repr(client), repr(client.holder.settings), repr(vars(server))):
            assert key not in shown
        other = ServiceClient(
            base_url=server.base_url, api_key="tml-wrong"
        )  # an explicit key is used as it is
        with pytest.raises(AuthenticationError):
            other.get_server_capabilities()
        other.close().result(PATIENCE_S)


def test_a_script_for_the_hosted_service_runs_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "local")
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-hosted-service")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "exit 3")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # closed
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    settings = Settings.resolve(api_key="tml-of-the-hosted-service")
    content = pickle.dumps(settings)
    assert not current().running
    assert settings.api_key == current().key
    assert current().key.reveal().encode() not in content
    back = pickle.loads(content)
    assert (back.base_url, back.api_key) == (settings.base_url, settings.api_key)
    assert settings.credential_cmd is back.credential_cmd is None
    with ServiceClient(api_key="tml-of-the-hosted-service") as client:
        assert client.get_server_capabilities().supported_models
        with ServiceClient(base_url=settings.base_url) as other:  # the address is enough
            assert other.get_server_capabilities().supported_models


def test_a_killed_server_is_reported_and_replaced() -> None:
    client = ServiceClient(base_url="local")
    client.get_server_capabilities()
    server = current()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    until = time.monotonic() + PATIENCE_S
    while server.running:
        assert time.monotonic() < until
    with pytest.raises(
        APIConnectionError, match=r"embedded server has ended \(signal 9\); make a new client"
    ):
        client.get_server_capabilities()
    with ServiceClient(base_url="local") as other:
        assert other.get_server_capabilities().supported_models
        assert current() is not server
    client.close().result(PATIENCE_S)


def test_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("TINKER_LOCAL_DATA_DIR", str(tmp_path / "file"))
    client = ServiceClient(base_url="local")
    with pytest.raises(ConfigurationError, match="file cannot be used: it is not a directory; name another"):
        client.get_server_capabilities()
    (tmp_path / "file").unlink()
    training = client.create_lora_training_client(TINY, rank=2).result()  # the next call tries again
    path = training.save_state("kept").result(PATIENCE_S).path
    monkeypatch.setenv("TINKER_LOCAL_DATA_DIR", str(tmp_path / "other"))
    with pytest.raises(ConfigurationError, match="in use, with another directory"):
        ServiceClient(base_url="local")
    client.close().result(PATIENCE_S)
    monkeypatch.setenv("TINKER_LOCAL_DATA_DIR", str(tmp_path / "file"))
    with ServiceClient(base_url="local") as later:
        assert later.create_training_client_from_state_with_optimizer(path).result() is not None


def test_a_failed_start_shows_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sqlite3.py").write_text(
        "import os, sys; print('I cannot go on', file=sys.stderr); os._exit(9)"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    server = EmbeddedServer()
    with pytest.raises(
        ConfigurationError, match=r"did not start \(exit code 9\). The end of its log:\nI cannot go on"
    ):
        server.start()
    assert not server.running


@pytest.mark.skipif(sys.platform == "win32", reason="has other rights")
@pytest.mark.parametrize("what", ["link", "open", "file"])
def test_an_open_key_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / f"tinker-sync-{os.getuid()}"
    if what == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    elif what == "open":
        place.mkdir()
        place.chmod(0o755)
    else:
        place.write_text("")
    with pytest.raises(ConfigurationError, match=r"tinker-sync-\d+ cannot be used"):
        EmbeddedServer().start()
    assert _embedded.find_key("http://127.0.0.1:1") is None


def test_files_of_killed_servers_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = EmbeddedServer()
    first = server.record._replace(base_url="http://127.0.0.1:1")
    place, alive = launch.publish_record(first)
    assert _embedded.find_key("http://127.0.0.1:1") == first.key
    alive.close()  # as the system does when the server is killed
    assert _embedded.find_key("http://127.0.0.1:1") is None
    other, alive = launch.publish_record(server.record)
    with alive:
        assert not place.exists()
        assert other.exists()
    server.stop()


def test_a_server_whose_port_another_program_took_is_replaced() -> None:
    with ServiceClient(base_url="local") as client:
        client.get_server_capabilities()
    stopped = current()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", int(stopped.base_url.rpartition(":")[2])))
        other.listen()
        with ServiceClient(base_url="local") as later:
            assert later.get_server_capabilities().supported_models
            assert current() is not stopped


def test_a_server_that_could_not_be_started_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    server = EmbeddedServer()
    with pytest.raises(ConfigurationError, match=r"could not be started: .*no-python"):
        server.start()
    assert launch.find_record(server.base_url) is None
    assert list(launch.open_root().iterdir()) == []
