"""The keeper process keeps a session alive while its owner is stuck, stopped or dead."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from support.authority import Authority
from support.clock import FakeClock
from support.crowd import until
from support.embedded import KEY, Running, running
from support.raising import raising
from support.scripts import Script
from support.servers import AnsweringServer, ProxyServer, answer

from tinker_sync import AdamParams, ConfigurationError, ServiceClient, TinkerError
from tinker_sync.config import Settings
from tinker_sync.runtime import _keeper_process, heartbeat
from tinker_sync.runtime.calls import make_call
from tinker_sync.runtime.keeper import Keeper
from tinker_sync.transport.http import Http

PERIOD_S, OUTLIVE_S = 10.0, 60.0
ABANDONED_AFTER_S = 100.0
SIGNALS = pytest.mark.skipif(sys.platform == "win32", reason="stops processes by signals")


# ---------------------------------------------------------------------------------------------- decisions
class Bench:
    """The loop of a keeper, with a scripted owner and server, on a clock that jumps to the next event.

    Args:
        reports: times, each with the line of the owner that arrives then; None is the owner's death.
        statuses: the statuses of the answers to heartbeats; the last one is repeated.
        always_offered: True if every server of this kind has heartbeats.
    """

    def __init__(
        self, *reports: tuple[float, Any], statuses: tuple[int, ...] = (200,), always_offered: bool = True
    ) -> None:
        self.now_s = 0.0
        self.beats: list[float] = []
        self.keys: list[str] = []
        self._reports = list(reports)
        self._statuses = list(statuses)
        orders = {
            **heartbeat.policy(),
            "headers": {"X-API-Key": "first"},
            "always_offered": always_offered,
            "period_s": PERIOD_S,
            "silence_s": PERIOD_S * 1.5,
            "outlive_s": OUTLIVE_S,
        }
        self._watch = _keeper_process.Watch(orders, self, self.send, lambda: self.now_s)  # type: ignore[arg-type]

    def get(self, timeout: float) -> Any:
        if self._reports and self._reports[0][0] <= self.now_s + timeout:
            self.now_s, line = self._reports.pop(0)
            return line
        if self.now_s > 1000:
            raise TimeoutError("it goes on")
        self.now_s += timeout
        raise queue.Empty

    def send(self, headers: dict[str, str]) -> int:
        self.beats.append(self.now_s)
        self.keys.append(headers["X-API-Key"])
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]

    def ends(self) -> bool:
        """Run the loop. Return True if it ends, and False if it still runs after 1000 s of the clock."""
        try:
            self._watch.run()
        except TimeoutError:
            return False
        return True


DEATH = (0.0, None)


def test_it_is_silent_while_the_owner_beats() -> None:
    bench = Bench(*[(10.0 * number, {}) for number in range(1, 20)], (191.0, None))
    assert bench.ends()
    assert bench.beats[0] > 190
    assert bench.beats[-1] < 191 + OUTLIVE_S


def test_it_beats_each_period_while_a_living_owner_is_silent() -> None:
    bench = Bench((10.0, {}))
    assert not bench.ends()  # the owner lives, so the keeper keeps the session alive
    assert bench.beats[:3] == [25.0, 35.0, 45.0]


def test_it_outlives_a_dead_owner_for_a_limited_time() -> None:
    bench = Bench(DEATH)
    assert bench.ends()
    assert bench.beats == [10.0, 20.0, 30.0, 40.0, 50.0]


def test_renewed_headers_count_from_then_on() -> None:
    bench = Bench((16.0, {"headers": {"X-API-Key": "second"}}), (40.0, None))
    assert bench.ends()
    assert bench.keys[0] == "first"
    assert set(bench.keys[1:]) == {"second"}


@pytest.mark.parametrize("code", [0, 402, 403, 408, 429, 500, 503])
def test_trouble_changes_nothing(code: int) -> None:
    bench = Bench(DEATH, statuses=(200, code))
    assert bench.ends()
    assert len(bench.beats) == 5


def test_a_session_that_is_over_is_the_end() -> None:
    bench = Bench(statuses=(200, 410))
    assert bench.ends()
    assert len(bench.beats) == 2


@pytest.mark.parametrize("code", [401, 404])
def test_a_refusal_that_stays_is_the_end_for_an_orphan_alone(code: int) -> None:
    orphan = Bench(DEATH, statuses=(200, code))
    assert orphan.ends()
    assert len(orphan.beats) == 3  # as in heartbeats of the owner, the second refusal ends them
    assert not Bench(statuses=(200, code)).ends()


def test_refusals_with_other_trouble_between_them_do_not_add_up() -> None:
    orphan = Bench(DEATH, statuses=(404, 503, 404, 503, 200))
    assert orphan.ends()
    assert len(orphan.beats) == 5  # it ends because its time is over


def test_lines_may_arrive_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b'{"headers":{"X-API', b'-Key":"second"}}\n{', b"}\n", b""]
    scripted = SimpleNamespace(read=lambda _descriptor, _count: pieces.pop(0))
    monkeypatch.setattr(_keeper_process, "os", scripted)
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _keeper_process.read(lines)
    assert [lines.get(timeout=0) for _ in range(3)] == [{"headers": {"X-API-Key": "second"}}, {}, None]


def test_a_server_that_has_no_heartbeats_gets_none() -> None:
    assert Bench(statuses=(404,), always_offered=False).ends()
    assert not Bench((1.0, {}), statuses=(404,), always_offered=False).ends()  # the owner has had an answer


# ---------------------------------------------------------------------------------------------- requests
def send_once(url: str) -> tuple[int, dict[str, Any]]:
    settings = Settings.resolve(base_url=url, api_key="tml-mine", default_headers={"X-Mine": "yes"})
    http = Http(settings, _Key())
    call = make_call("session_heartbeat", settings, {"session_id": "s", "type": "session_heartbeat"})
    orders = json.loads(json.dumps(http.describe(call)))
    status = _keeper_process.send_with(orders)(http.headers_of(call))
    http.close()
    return status, orders


class _Key:
    def credential(self) -> str:
        return "tml-mine"

    for_exchange = credential

    def renewed(self, rejected: object) -> None:
        del rejected


def test_a_request_is_that_of_the_owner() -> None:
    with AnsweringServer(lambda seen: answer(b"{}")) as server:
        status, orders = send_once(f"{server.url}/prefix")
    [seen] = server.seen
    assert (status, seen.target) == (200, "/prefix/api/v1/session_heartbeat")
    assert json.loads(seen.body)["session_id"] == "s"
    assert (seen.header("x-api-key"), seen.header("x-mine")) == ("tml-mine", "yes")
    assert "tml-mine" not in json.dumps(orders)


@pytest.mark.parametrize("proxied", [False, True])
def test_private_authority_and_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxied: bool) -> None:
    authority = Authority(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", Path(authority.ca_file).name)
    with (
        AnsweringServer(lambda seen: answer(b"{}"), tls=authority.server_context()) as server,
        ProxyServer(user="me", password="mine") as proxy,
    ):
        if proxied:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("http://", "http://me:mine@"))
        status, orders = send_once(server.url)
        assert status == 200
        assert orders["tls"]["trusted"] == authority.ca_file  # the keeper has another working directory
        assert len(proxy.seen) == proxied
        monkeypatch.delenv("REQUESTS_CA_BUNDLE")
        assert send_once(server.url)[0] == 0  # an unknown authority


def test_plain_requests_go_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        AnsweringServer(lambda seen: answer(b"{}")) as server,
        ProxyServer(user="me", password="mine") as proxy,
    ):
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("http://", "http://me:mine@"))
        assert send_once(server.url)[0] == 200
        assert len(proxy.seen) == len(server.seen) == 1


def test_it_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigurationError, match=r"keeper: its process cannot use session=\.\.\."):
        ServiceClient(base_url="http://127.0.0.1:1", keeper=True, session=requests.Session())
    for wrong in (0, -1.0, float("nan"), float("inf"), "yes"):
        with pytest.raises(ConfigurationError, match="keeper: expected True, False, or a positive number"):
            ServiceClient(base_url="http://127.0.0.1:1", keeper=wrong)  # type: ignore[arg-type]


def test_its_program_loads_the_standard_library_alone() -> None:
    program = f"""
import runpy, sys
runpy.run_path({_keeper_process.__file__!r}, run_name="here")
print(sorted({{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names - {{"__main__"}}))
"""
    found = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, check=True)
    assert found.stdout.decode().strip() == "[]"


# ---------------------------------------------------------------------------------------------- processes
class Ground:
    """A server with a clock that the test advances.

    The server drops a session, and its models, after `ABANDONED_AFTER_S` without a request.
    """

    def __init__(self, server: Running, clock: FakeClock) -> None:
        self.server = server
        self._service = server.app.service
        self._clock = clock

    @property
    def models(self) -> list[str]:
        """The models in the server's memory."""
        return list(self._service.models)

    def outlasts(self, session_id: str) -> None:
        """Check that heartbeats keep a session alive while the clock advances by 3.2 times the limit."""
        for _ in range(4):
            until(lambda: self._seen_at_s(session_id) == self._clock.now())
            self.pass_by(ABANDONED_AFTER_S * 0.8)

    def pass_by(self, seconds: float) -> None:
        """Advance the clock of the server, and let it drop the sessions that were silent for too long."""
        self._clock.advance(seconds)
        swept: queue.SimpleQueue[None] = queue.SimpleQueue()

        def sweep() -> None:
            self._service._sweep()
            swept.put(None)

        self._service.loop.call_soon_threadsafe(sweep)
        swept.get(timeout=120)

    def _seen_at_s(self, session_id: str) -> float | None:
        session = self._service.sessions.get(session_id)
        return None if session is None else session.seen_at_s


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    clock = FakeClock(automatic=False)
    with running(tmp_path / "data", clock=clock, abandoned_after_s=ABANDONED_AFTER_S) as server:
        yield Ground(server, clock)


OWNER = """
import ctypes, warnings
from tinker_sync.runtime import heartbeat

heartbeat.PERIOD_S = 0.05
service = ServiceClient(keeper=True, journal=os.environ["JOURNAL"])
training = service.create_lora_training_client("tinker-sync/tiny", rank=2).result()
session = service.holder.server.session
say(session.session_id)
say(session._heartbeat._keeper.pid)
while True:
    order = hear()
    if order == "step":
        say(sorted(training.optim_step(types.AdamParams()).result(120).metrics))
    elif order == "hold the lock":
        say("holds it")
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(100), 100)  # unlike CDLL, it keeps the lock
        say("has let go")
    elif order == "fork":
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # a fork of several threads
        child = os.fork()
        if not child:
            signal.pause()
        say(child)
    elif order == "close":
        service.close().result(120)
        say("closed")
"""


def owner(ground: Ground, journal: Path) -> Script:
    return Script(
        OWNER, TINKER_API_KEY=KEY, TINKER_BASE_URL=ground.server.url, TINKER_PACE="0.01", JOURNAL=str(journal)
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


@SIGNALS
def test_a_session_outlasts_an_owner_that_is_stuck_or_stopped(ground: Ground, tmp_path: Path) -> None:
    with owner(ground, tmp_path / "run.journal") as script:
        session, keeper = script.hear(), int(script.hear())
        script.say("hold the lock")
        assert script.hear() == "holds it"
        ground.outlasts(session)
        script.say()
        assert script.hear() == "has let go"

        script._process.send_signal(signal.SIGSTOP)
        ground.outlasts(session)
        script._process.send_signal(signal.SIGCONT)
        script.say("step")
        assert script.hear() == "['grad_norm', 'learning_rate']"
        assert ground.models

        check_secrets(keeper)
        script.say("close")
        assert script.hear() == "closed"
        assert not is_alive(keeper)  # its owner, which still lives, has reaped it
        with pytest.raises(ProcessLookupError):
            os.kill(keeper, 0)


def check_secrets(keeper: int) -> None:
    """Check that the command line and environment of a keeper process lack the key.

    Check also that the process has no file or socket of its owner.
    """
    place = Path(f"/proc/{keeper}")
    if place.exists():
        assert KEY.encode() not in (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        files = {os.readlink(path) for path in (place / "fd").iterdir() if path.name in ("1", "2")}
        assert files == {os.devnull}
        others = [path.name for path in (place / "fd").iterdir() if int(path.name) > 2]
        assert len(others) <= 1  # the connection of the keeper


@SIGNALS
def test_attach_finds_the_session_of_a_killed_owner(ground: Ground, tmp_path: Path) -> None:
    journal = tmp_path / "run.journal"
    with owner(ground, journal) as script:
        session, keeper = script.hear(), int(script.hear())
        script.say("step")
        script.hear()
        script.say("fork")
        child = int(script.hear())  # the keeper must notice the death despite the child's copy of the pipe
        script._process.kill()
        script._process.wait(120)
        try:
            ground.outlasts(session)
            # The living child must not keep its copy of the journal locked.
            with ServiceClient.attach(journal, api_key=KEY, keeper=30.0) as service:
                [training] = service.trainings
                assert training.model_id.startswith(session)
                assert training.optim_step(AdamParams()).result(120).metrics
                assert is_alive(keeper)
        finally:
            os.kill(child, signal.SIGKILL)
        until(lambda: not is_alive(keeper))  # the session has ended


@SIGNALS
def test_without_a_keeper_the_session_is_lost(ground: Ground, tmp_path: Path) -> None:
    with owner(ground, tmp_path / "run.journal") as script:
        script.hear()
        keeper = int(script.hear())
        script._process.send_signal(signal.SIGSTOP)
        os.kill(keeper, signal.SIGKILL)
        until(lambda: not is_alive(keeper))
        ground.pass_by(ABANDONED_AFTER_S * 2)
        until(lambda: not ground.models)
        script._process.send_signal(signal.SIGCONT)
        while "the keeper has ended (exit code -9)" not in script.err_line():  # others may come first
            pass


REQUEST = {
    "host": "127.0.0.1", "port": 1, "tls": None, "proxy": None, "target": "/", "address": "", "body": "",
    "timeout_s": 1.0,
}  # fmt: skip


class Silence:
    """A keeper that sends no heartbeat, because its period is an hour, with scripted headers of its owner."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str] | TinkerError] = [{"X-API-Key": "first"}]
        policy = {**heartbeat.policy(), "always_offered": True}
        self.keeper = Keeper(self.next_headers, REQUEST, policy, period_s=3600.0, outlive_s=3600.0)

    def next_headers(self) -> dict[str, str]:
        headers = self.headers.pop(0) if len(self.headers) > 1 else self.headers[0]
        if isinstance(headers, TinkerError):
            raise headers
        return headers


def test_a_key_that_cannot_be_renewed_ends_nothing() -> None:
    silence = Silence()
    silence.headers += [TinkerError("no token"), {"X-API-Key": "second"}]
    keeper = silence.keeper
    keeper.start()
    try:
        for _ in range(3):
            keeper.note_beat()
        assert keeper.pid is not None
    finally:
        keeper.end()
    keeper.end()
    assert keeper.pid is None
    keeper.note_beat()


def test_a_key_that_is_too_long_for_one_write_is_not_sent_in_part(caplog: pytest.LogCaptureFixture) -> None:
    silence, written = Silence(), []
    process: Any = SimpleNamespace(stdin=SimpleNamespace(write=written.append), poll=lambda: None)
    silence.keeper._process = process
    silence.headers = [{"X-API-Key": "k" * 5000}]
    silence.keeper.note_beat()
    assert written == [b"{}\n"]
    assert "the keeper cannot take the renewed key: it is too long" in caplog.text


def test_a_child_closes_its_copy_of_the_pipe_and_leaves_the_keeper_alone() -> None:
    keeper, closed = Silence().keeper, threading.Event()
    stdin = SimpleNamespace(close=closed.set)
    process: Any = SimpleNamespace(
        stdin=stdin, returncode=None, kill=raising(AssertionError("it is the parent's"))
    )
    keeper._process = process
    keeper.forget()
    assert closed.is_set()
    assert keeper.pid is None


@pytest.mark.skipif(sys.platform == "win32", reason="no sessions of processes, and no such pipes")
def test_neither_the_terminal_reaches_it_nor_can_its_pipe_block_the_owner() -> None:
    keeper = Silence().keeper
    keeper.start()
    try:
        pid, process = keeper.pid, keeper._process
        assert pid is not None
        assert process is not None
        assert process.stdin is not None
        assert os.getsid(pid) == pid
        assert not os.get_blocking(process.stdin.fileno())
    finally:
        keeper.end()


def test_without_a_key_at_the_start_there_is_no_keeper(caplog: pytest.LogCaptureFixture) -> None:
    silence = Silence()
    silence.headers = [TinkerError("no token")]
    silence.keeper.start()
    assert silence.keeper.pid is None
    assert "the keeper could not be started, heartbeats depend on this process: no token" in caplog.text
    silence.keeper.note_beat()
    silence.keeper.end()


def test_no_keeper_is_left_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Silence().keeper
    keeper.start()
    pid = keeper.pid
    assert pid is not None

    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    beats = heartbeat.Heartbeat(lambda: None, _Listener(), keeper=keeper)
    with pytest.raises(TinkerError, match="can't start new thread"):
        beats.start()
    assert not is_alive(pid)


class _Listener:
    def on_lost(self, error: TinkerError) -> None: ...

    def on_found(self) -> None: ...

    def on_late(self, delay_s: float, reason: str) -> None: ...


def test_failed_start_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    keeper = Silence().keeper
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    keeper.start()
    assert "the keeper could not be started, heartbeats depend on this process" in caplog.text
    keeper.note_beat()
    keeper.end()


@pytest.mark.parametrize("drop", [lambda service: service.close().result(120), lambda service: None])
def test_a_client_that_ends_or_is_dropped_takes_its_keeper_along(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, drop: Callable[[ServiceClient], object]
) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.05)
    service = ServiceClient(base_url=ground.server.url, api_key=KEY, keeper=1.0)
    service.create_lora_training_client("tinker-sync/tiny", rank=2).result()
    beats = service.holder.server.session._heartbeat
    keeper = beats._keeper.pid
    assert keeper is not None
    assert is_alive(keeper)
    drop(service)
    del service, beats
    until(lambda: not is_alive(keeper))
