"""`serve` and `python -m tinker_sync.local`: a server that a user starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.served import served

from tinker_sync import (
    APIConnectionError,
    AuthenticationError,
    ConfigurationError,
    NotFoundError,
    ServiceClient,
    _embedded,
)
from tinker_sync._base.secret import Secret
from tinker_sync.config import Settings
from tinker_sync.local import launch, running, serve
from tinker_sync.local.launch import EmbeddedServer


def ended(process: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str, str]:
    process.send_signal(how)
    # `communicate` would miss output that `readline` has buffered.
    output, errors = process.stdout.read(), process.stderr.read()
    return process.wait(PATIENCE_S), output, errors


def test_it_serves_until_a_signal_and_clients_find_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served("--data-dir", tmp_path / "data") as (process, url):
        place = launch.locate(int(url.rpartition(":")[2]))
        monkeypatch.setenv("TINKER_API_KEY", "tml-of-another-server")
        for _ in range(2):
            assert Settings.resolve(base_url=url).api_key_source == "local"
        (warning,) = [text for text in caplog.messages if "TINKER_API_KEY" in text]
        assert f"is not used for {url}" in warning
        assert "another-server" not in warning
        with ServiceClient(base_url=url.replace("http:", "https:")) as client:
            with pytest.raises(APIConnectionError, match="does not speak TLS") as failed:
                client.get_server_capabilities()
            assert failed.value.attempts == 1
        with ServiceClient(base_url=url) as client:
            assert client.get_server_capabilities().supported_models
        # With the key, the error is about the path.
        wrong = pytest.raises(NotFoundError, match="base URL ends with /v2")
        with ServiceClient(base_url=f"{url}/v2") as client, wrong:
            client.get_server_capabilities()
        found = _embedded.find_key(url)
        key = found.reveal()
        code, output, errors = ended(process, signal.SIGTERM)
        assert (code, output) == (0, "")
        assert key not in errors
        assert "--show-key" in errors
        assert not place.exists()
    assert (tmp_path / "data" / "state.sqlite").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="cannot hand open files to children")
@pytest.mark.parametrize("base_url", ["a server that a user has started", "local"])
def test_the_key_of_a_killed_server_is_not_for_the_next_program_at_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_url: str
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-another-server")
    with ExitStack() as programs:
        if base_url == "local":
            server = EmbeddedServer()
            programs.callback(server.stop)
            server.start()
            pid, url = server.pid, server.base_url
        else:
            process, url = programs.enter_context(served("--data-dir", tmp_path / "data"))
            pid = process.pid
        assert Settings.resolve(base_url=url).api_key_source == "local"
        os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        settings = Settings.resolve(base_url=url)
        assert settings.api_key_source == "environment"
        assert settings.api_key == Secret("tml-of-another-server")


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.2"])
def test_clients_find_the_key_of_every_loopback_address(tmp_path: Path, host: str) -> None:
    with in_thread(host=host, data_dir=tmp_path / "data") as (url, key):
        assert Settings.resolve(base_url=url).api_key == key
        port = url.rpartition(":")[2]
        # Another program may listen there.
        assert _embedded.find_key(f"http://127.0.0.1:{port}") is None
        with ServiceClient(base_url=url) as client:
            assert client.get_server_capabilities().supported_models
    assert _embedded.find_key(url) is None


@pytest.mark.skipif(sys.platform != "linux", reason="sets the limits of another process")
def test_a_server_without_free_files_says_so_once_and_goes_on(tmp_path: Path) -> None:
    import resource

    with served("--data-dir", tmp_path / "data") as (process, url):
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        limit = len(list(Path(f"/proc/{process.pid}/fd").iterdir())) + 5
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        lines = [socket.create_connection(place) for _ in range(20)]
        while "no connection can be accepted: Too many open files" not in process.stderr.readline():
            assert process.poll() is None
        for line in lines:
            line.close()
        with socket.create_connection(place) as line:
            line.settimeout(PATIENCE_S)
            line.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: h\r\n\r\n")
            assert line.recv(1000).startswith(b"HTTP/1.1 200")
        code, _, errors = ended(process, signal.SIGTERM)
        assert code == 0
        assert len(errors.splitlines()) < 5


def test_a_key_that_other_machines_can_guess_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"key: .*at least 16 characters"):
        serve(host="0.0.0.0", allow_remote=True, key="k", data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_the_key_of_a_key_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("tml-mine-0123456789\nmore\n")
    arguments = ["--data-dir", tmp_path / "data", "--show-key", "--key-file", tmp_path / "key"]
    with served(*arguments, TINKER_LOCAL_KEY="tml-less-important") as (process, url):
        with ServiceClient(base_url=url, api_key="tml-wrong") as client, pytest.raises(AuthenticationError):
            client.get_server_capabilities()
        with ServiceClient(base_url=url, api_key="tml-mine-0123456789") as client:
            assert client.get_server_capabilities().supported_models
        code, output, errors = ended(process, signal.SIGINT)
    assert (code, output) == (0, "tml-mine-0123456789\n")
    assert "tml-mine" not in errors


def test_a_directory_or_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(data_dir=tmp_path / "data") as (url, _):
        assert running.main(["--data-dir", str(tmp_path / "data")]) == 1
        assert f"another server (process {os.getpid()}) uses" in capsys.readouterr().err
        port = url.rpartition(":")[2]
        assert running.main(["--data-dir", str(tmp_path / "other"), "--port", port]) == 1
        told = capsys.readouterr().err
        assert f"127.0.0.1:{port}" in told
        assert "--port" in told
        assert _embedded.find_key(url)  # the key file of the first server still exists
    assert _embedded.find_key(url) is None


def test_a_bad_port_or_directory_is_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert running.main(["--data-dir", str(tmp_path / "data"), "--port=65536"]) == 1
    assert "port 65536" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "below"):
        assert running.main(["--data-dir", str(place)]) == 1
        told = capsys.readouterr().err
        assert str(place) in told
        assert "--data-dir" in told
    assert file.read_text() == "mine"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::", ""])
def test_a_remote_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match="allow_remote=True"):
        serve(host=host, data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()


@contextmanager
def in_thread(**options: Any) -> Iterator[tuple[str, Secret]]:
    """Run `serve` in a thread other than the main one, until the end of the block. Yield address and key."""
    ready, stops, addresses = threading.Event(), [], []

    def listens(url: str, key: Secret) -> None:
        addresses.append((url, key))
        ready.set()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(serve, ready=listens, begun=stops.append, **options)
        ended.add_done_callback(lambda _: ready.set())
        try:
            assert ready.wait(PATIENCE_S)
            if ended.done():
                ended.result()
            yield addresses[0]
        finally:
            for stop in stops:
                stop()
            ended.result(PATIENCE_S)


def test_allow_remote_and_stop_from_a_thread(tmp_path: Path) -> None:
    options = {"host": "0.0.0.0", "allow_remote": True, "json_only": True, "data_dir": tmp_path / "data"}
    with in_thread(**options) as (url, key):
        assert url.startswith("http://0.0.0.0:")
        address = url.replace("0.0.0.0", "127.0.0.1")
        with ServiceClient(base_url=address, api_key=key.reveal()) as client:
            assert client.get_server_capabilities().supported_models
            assert not client.holder.server.start().facts.dialect.protobuf
        assert _embedded.find_key(address) is None  # a remote server publishes no key file
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes")
def test_bodies_of_senders_without_a_key_take_no_memory(tmp_path: Path) -> None:
    with served("--data-dir", tmp_path / "data") as (process, url), ExitStack() as lines:

        def peak_bytes() -> int:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

        before, size = peak_bytes(), 32 << 20
        for path in ("/api/v1/forward_backward", "/api/v1/files/upload/a/file/b?signature=c"):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            line.settimeout(PATIENCE_S)
            head = (
                f"POST {path} HTTP/1.1\r\nHost: h\r\nX-API-Key: tml-wrong\r\nContent-Length: {size}\r\n\r\n"
            )
            for _ in range(2):  # the connection stays usable
                line.sendall(head.encode() + b"x" * size)
                answer = b""
                while b'"}' not in answer:
                    answer += line.recv(1000)
                assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 403", b"HTTP/1.1 405"))
        assert peak_bytes() - before < size


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_key_file_without_a_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "key").write_text(content)
    assert running.main(["--key-file", str(tmp_path / "key"), "--data-dir", str(tmp_path / "data")]) == 1
    assert str(tmp_path / "key") in capsys.readouterr().err


def test_a_model_directory_is_offered_beside_the_built_in_model(tmp_path: Path) -> None:
    from tinker_sync.local import tiny

    (tmp_path / "mine").mkdir()
    for path in tiny.directory().iterdir():
        (tmp_path / "mine" / path.name).write_bytes(path.read_bytes())
    server = in_thread(data_dir=tmp_path / "data", model=tmp_path / "mine")
    with server as (url, _), ServiceClient(base_url=url) as client:
        names = {model.model_name for model in client.get_server_capabilities().supported_models}
        assert names == {"tinker-sync/tiny", "mine"}
        assert client.create_lora_training_client("mine", rank=2).result() is not None
