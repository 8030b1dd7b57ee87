"""`check`: the tables of healthy, faulty and billing servers, on which nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import Run, runner
from support.open_servers import ALL, TxLike
from support.tinker_stub import StubServer

import tinker_sync
from tinker_sync.errors import ConfigurationError, InvalidInputError
from tinker_sync.testing import CheckReport, Fault, FaultPlan, LocalServer, check, faults
from tinker_sync.testing.cassette import Cassette

MODEL = "tinker-sync/random"
STEPS = ["models", "budget", "session", "model", "pass", "step", "save", "sample", "resume", "download"]
END = ["delete", "end", "left behind"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a directory for temporary files, and require that no check has left one there."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TINKER_PACE", "0.01")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    left = [each for each in directory.rglob("*") if each.is_file() or "check" in each.name]
    assert left == []


def use(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.service() as service:
        monkeypatch.setenv("TINKER_BASE_URL", service.get_console_url())
    monkeypatch.setenv("TINKER_API_KEY", server.key)


def rows(report: CheckReport | None) -> dict[str, Any]:
    assert report is not None
    return {row.name: row for row in report.rows}


def assert_nothing_is_left(server: LocalServer) -> None:
    server.plan = FaultPlan()
    with server.service() as service:
        assert list(service.create_rest_client().iter_user_checkpoints()) == []
    begun = [call for call in server.calls_to("create_session") if call.status == 200]
    ended = {call.ids["session"] for call in server.calls_to("finish_session") if call.status == 200}
    assert len(begun) == len(ended)


def test_a_healthy_server_has_a_table_without_remarks(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalServer(model=MODEL, data_dir=tmp_path / "data") as server:
        use(server, monkeypatch)
        report = check(to=tmp_path / "run.cassette")
        found = rows(report)
        assert [name for name in found if name in STEPS + END] == STEPS + END
        assert {found[name].state for name in STEPS + END} == {"ok"}
        assert report is not None
        assert (report.failed, report.model) == ([], MODEL)
        assert 0 < report.tokens.total <= 206
        unloaded = [call for call in server.calls_to("unload_model") if call.status == 200]
        assert len(unloaded) == len(server.calls_to("create_model")) + len(server.calls_to("load_weights"))
        assert_nothing_is_left(server)
    assert report.cassette == tmp_path / "run.cassette"
    text = report.cassette.read_text()
    assert server.key not in text
    exchanges = Cassette.load(report.cassette).exchanges
    targets = {exchange.target.rpartition("/")[2] for exchange in exchanges}
    assert {"create_session", "forward_backward", "optim_step", "asample", "finish"} <= targets


def test_the_protocol_is_that_of_the_server_and_its_tokens_are_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"pjwt_auth_enabled": True, "sample_use_retrieve_futures": True}
    with LocalServer(model=MODEL, **flags) as server:
        use(server, monkeypatch)
        report = check(to=tmp_path / "run.cassette")
        assert report is not None
        assert report.failed == []
        assert server.calls_to("auth_token") != []
        assert server.calls_to("retrieve_futures") != []
    text = (tmp_path / "run.cassette").read_text()
    assert '"pjwt_auth_enabled": true' in text
    assert '"jwt": "***"' in text
    assert "eyJ" not in text  # as each token begins


FAULTS: list[tuple[str, Fault, int | None, str, str, str]] = [
    ("forward_backward", faults.status(503), 1, "pass", "warning", "503 at forward_backward"),
    ("asample", faults.too_many_requests(1), 1, "sample", "warning", "429 at asample"),
    ("optim_step", faults.lost_answer(), 1, "step", "warning", "no answer .* at optim_step"),
    ("save_weights", faults.truncated(), 1, "save", "warning", "no answer .* at save_weights"),
    ("save_weights", faults.status(500), range(1, 3), "save", "warning", r"500 at save_weights \(2 times\)"),
    ("forward_backward", faults.garbage(), None, "pass", "failure", "is not JSON.*It works!"),
    ("retrieve_future", faults.promise_failed("out of memory"), 2, "pass", "failure", "out of memory"),
    ("retrieve_future", faults.queue_paused(reason="all busy"), 3, "step", "warning", "pause.*all busy"),
    ("save_weights_for_sampler", faults.empty_bad_request(), None, "sample", "failure", "400 Bad Request"),
    ("optim_step", faults.empty_bad_request(), 1, "step", "warning", "400 at optim_step"),
    ("create_session", faults.status(402), None, "session", "failure", "402 Payment Required"),
    ("create_model", faults.status(403, detail="not yours"), None, "model", "failure", "403.*not yours"),
    ("asample", faults.status(401), None, "sample", "failure", "401 Unauthorized"),
    ("load_weights", faults.status(404, detail="gone"), None, "resume", "failure", "404.*gone"),
    ("get_server_capabilities", faults.status(500), None, "access", "failure", "500"),
    ("delete_checkpoint", faults.hang_up(), range(2, 4), "delete", "warning", "no answer .* at check"),
    ("unload_model", faults.status(409), None, "end", "warning", "409"),
    ("get_external_weights_urls", faults.status(500), 99, "download", "ok", "adapter_config.json"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "fault", "nth", "name", "state", "seen"),
    FAULTS,
    ids=[f"{call}-{number}" for number, (call, *_) in enumerate(FAULTS)],
)
def test_each_fault_is_named_in_its_row(
    call: str, fault: Fault, nth: Any, name: str, state: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalServer(FaultPlan().on(call, fault, nth=nth), model=MODEL) as server:
        use(server, monkeypatch)
        report = check(deadline=30)
        found = rows(report)
        assert (found[name].state, bool(re.search(seen, found[name].seen))) == (state, True), found[name]
        others = [row for row in found.values() if row.name not in (name, "clock")]
        assert {row.state for row in others if row.name in STEPS} <= {"ok", "skipped"}
        if state != "failure":
            assert report is not None
            assert report.failed == []
            assert {row.state for row in others} == {"ok"}
        assert_nothing_is_left(server)


def test_what_cannot_be_deleted_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().on("delete_checkpoint", faults.status(403, detail="read only"))
    with LocalServer(plan, model=MODEL) as server:
        use(server, monkeypatch)
        found = rows(check(deadline=30))
        assert found["delete"].state == "failure"
        assert "read only" in found["delete"].seen
        left = found["left behind"]
        assert (left.state, left.seen.count("tinker://")) == ("warning", 2)
        assert left.advice.startswith(f"tinker-sync checkpoint delete {left.seen.split(',')[0]}")
        with server.service() as service:  # should nobody do that
            assert all(each.expires_at for each in service.create_rest_client().iter_user_checkpoints())


def test_a_lost_session_is_named_and_the_paths_that_stay_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().on("load_weights", faults.session_expired(), nth=1)
    with LocalServer(plan, model=MODEL) as server:
        use(server, monkeypatch)
        found = rows(check(deadline=30))
        assert "410 Gone" in found["resume"].seen
        assert "tinker://" in found["left behind"].seen


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_an_open_server_is_checked_as_far_as_it_goes(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(kind()) as stub:
        monkeypatch.setenv("TINKER_API_KEY", "tml-open")
        found = rows(check(stub.url))  # type: ignore[attr-defined]
        assert found["budget"].seen == "this server does not bill"
        assert {found[name].state for name in ("session", "model", "pass")} <= {"ok", "warning"}
        assert found["left behind"].state == "ok"


@pytest.mark.parametrize("leave", [False, True])
def test_a_server_that_cannot_delete_keeps_nothing(monkeypatch: pytest.MonkeyPatch, leave: bool) -> None:
    with StubServer(TxLike()) as stub:
        monkeypatch.setenv("TINKER_API_KEY", "tml-open")
        found = rows(check(stub.url, leave=leave))  # type: ignore[attr-defined]
        saved = found["save"].state != "skipped"
        assert isinstance(stub, TxLike)
        assert (saved, bool(stub.checkpoints)) == (leave, leave)


# ------------------------------------------------------------------------------------- a server that bills


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    """Run a server under a name of the hosted service."""
    real: Callable[..., Any] = socket.getaddrinfo

    def resolve(host: Any, *more: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return real("127.0.0.1" if name == "check.thinkingmachines.dev" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with LocalServer(model=MODEL) as server:
        use(server, monkeypatch)
        with server.service() as service:
            port = service.get_console_url().rpartition(":")[2]
        monkeypatch.setenv("TINKER_BASE_URL", f"http://check.thinkingmachines.dev:{port}")
        yield server


def prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usd: float | None) -> None:
    file = tmp_path / "prices.json"
    rates = dict.fromkeys(("trained", "prompt", "cached", "sampled"), usd)
    file.write_text(json.dumps({"models": {MODEL: rates}}))
    monkeypatch.setenv("TINKER_PRICES", str(file))


def test_the_hosted_service_is_asked_about(
    hosted: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def say_no(question: str) -> bool:
        asked.append(question)
        return False

    prices(tmp_path, monkeypatch, 100.0)
    assert check(ask=say_no) is None
    assert hosted.calls_to("create_session") == []
    assert len(asked) == 1
    assert MODEL in asked[0]
    assert "206 tokens, which cost $0.0206" in asked[0]
    with pytest.raises(ConfigurationError, match="bills"):
        check()


@pytest.mark.parametrize(
    ("usd", "spend", "state", "seen"),
    [
        (100.0, 0.05, "ok", "which cost $0.0206"),
        (None, 0.05, "ok", "up to a price of $243 a million"),
        (1000.0, 0.05, "failure", "which cost $0.2060"),
    ],
)
def test_the_budget_is_named_and_kept(
    hosted: LocalServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usd: float | None,
    spend: float,
    state: str,
    seen: str,
) -> None:
    prices(tmp_path, monkeypatch, usd)
    report = check(ask=lambda question: seen in question, spend=spend)
    found = rows(report)
    assert (found["budget"].state, seen in found["budget"].seen) == (state, True)
    assert bool(hosted.calls_to("create_session")) is (state == "ok")
    if state == "ok":
        assert {found[name].state for name in STEPS + END} == {"ok"}
        assert_nothing_is_left(hosted)


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({}, "org/Small-1.5B-it"),
        ({"org/Huge-70B": 9.0, "org/Mixed-30B-A3B": 0.1}, "org/Mixed-30B-A3B"),
        ({"org/*": 2.0, "org/Huge-70B": 1.0}, "org/Huge-70B"),
    ],
)
def test_the_cheapest_model_is_chosen(
    rates: dict[str, float], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Offering(TxLike):
        lists_models = ("org/Huge-70B", "org/Mixed-30B-A3B", "org/Small-1.5B-it", "org/v2.1b-nameless")

    file = tmp_path / "prices.json"
    kinds = ("trained", "prompt", "cached", "sampled")
    file.write_text(json.dumps({"models": {name: dict.fromkeys(kinds, usd) for name, usd in rates.items()}}))
    monkeypatch.setenv("TINKER_PRICES", str(file))
    monkeypatch.setenv("TINKER_API_KEY", "tml-open")
    with StubServer(Offering()) as stub:
        report = check(stub.url)  # type: ignore[attr-defined]
    assert report is not None
    assert report.model == chosen


def test_a_model_that_is_not_offered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(model=MODEL) as server:
        use(server, monkeypatch)
        found = rows(check(model="org/other"))
        assert "org/other is not among tinker-sync/random" in found["models"].seen
        assert server.calls_to("create_session") == []


@pytest.mark.parametrize("options", [{"spend": 0}, {"spend": float("nan")}, {"deadline": -1}, {"spend": "5"}])
def test_wrong_arguments_are_refused(options: Any) -> None:
    with pytest.raises(InvalidInputError, match="expected a positive number"):
        check("local", **options)


# ---------------------------------------------------------------------------------------- the command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_the_command_prints_the_table_and_keeps_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(tmp_path.iterdir())
    with LocalServer(model=MODEL) as server:
        use(server, monkeypatch)
        shown = run("check")
        assert shown.code == 0
        assert "the loss of the same data falls" in shown.out
        assert set(tmp_path.iterdir()) == before
        data = run("check", "--report", "deep/run.cassette", "-f", "json").json
        assert data["report"] == "deep/run.cassette"
        assert {row["state"] for row in data["rows"] if row["name"] in STEPS + END} == {"ok"}
        assert Cassette.load("deep/run.cassette").exchanges


def test_the_command_fails_with_a_file_to_attach(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan().on("retrieve_future", faults.promise_failed("out of memory"), nth=2)
    with LocalServer(plan, model=MODEL) as server:
        use(server, monkeypatch)
        shown = run("check", "-f", "jsonl")
    assert shown.code == 1
    assert [row["name"] for row in shown.lines if row["state"] == "failure"] == ["pass"]
    assert shown.err.endswith("Error: something is wrong: pass\n")
    text = (tmp_path / "tinker-sync-check.cassette").read_text()
    assert "out of memory" in text
    assert server.key not in text


def test_the_command_asks(run: Run, hosted: LocalServer) -> None:
    shown = run("check", stdin="n\n")
    assert (shown.code, shown.out) == (0, "")
    assert "Go ahead? [y/N]" in shown.err
    assert hosted.calls_to("create_session") == []
    assert run("check", "--yes", "-q").code == 0
    assert hosted.calls_to("create_session") != []


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_ctrl_c_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(FaultPlan().latency("asample", 40_000), model=MODEL) as server:
        use(server, monkeypatch)
        command = [sys.executable, "-m", "tinker_sync", "check"]
        environment = {**os.environ, "PYTHONPATH": str(Path(tinker_sync.__file__).parents[1])}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as running:
            server.wait_for_calls("asample", 1, timeout=120)
            running.send_signal(signal.SIGINT)
            shown, _ = running.communicate(timeout=120)
        assert (running.returncode, shown) == (130, b"")
        assert_nothing_is_left(server)


def test_it_runs_on_the_server_of_this_machine(place: Path) -> None:
    del place
    report = check("local")
    assert report is not None
    assert report.failed == []
    with tinker_sync.ServiceClient(base_url="local") as service:
        assert list(service.create_rest_client().iter_user_checkpoints()) == []
