"""Mistyped command lines, warnings, and `--quiet`."""

from __future__ import annotations

import logging
import warnings

import pytest
from support.cli_runs import Run
from support.cli_world import World
from support.tinker_stub import Answer, StubServer

from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.config.address import DEFAULT_BASE_URL


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["chekpoint", "list"], "did you mean tinker-sync checkpoint?"),
        (["checkpoint", "lst"], "did you mean tinker-sync checkpoint list?"),
        (["download", "x"], "did you mean tinker-sync checkpoint download?"),
        (["list"], "tinker-sync run list or tinker-sync session list"),
        (["xyzzy"], "There are: auth, billing"),
        (["run", "list", "--limt", "3"], "--limit"),
        (["run", "list", "--format", "jsn"], "'json'"),
    ],
    ids=str,
)
def test_what_is_mistyped_gets_a_suggestion(run: Run, line: list[str], words: str) -> None:
    done = run(*line)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_are_lines(run: Run, world: World, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    def warn(*_: object) -> None:
        warnings.warn("this is on its way out", FutureWarning, stacklevel=2)
        warnings.warn("this is on its way out", FutureWarning, stacklevel=2)
        logging.getLogger("tinker_sync.session").warning("the server is %s", "slow")

    monkeypatch.setattr("tinker_sync.clients.service.ServiceClient.get_server_capabilities", warn)
    for name in (None, "tinker_sync"):  # pytest has handlers here, and an earlier test may have added some
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    done = run("model", "list", *(["-q"] if quiet else []))
    shown = [line for line in done.err.splitlines() if "Error" not in line]
    assert shown == ([] if quiet else ["Warning: this is on its way out", "Warning: the server is slow"])


def test_a_console_log_prints_warnings_once(run: Run, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: object) -> None:
        logging.getLogger("tinker_sync.session").warning("the server is slow")

    for name in (None, "tinker_sync"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    monkeypatch.setenv("TINKER_LOG", "info")
    monkeypatch.setattr("tinker_sync.clients.service.ServiceClient.get_server_capabilities", warn)
    log = logging.getLogger("tinker_sync")
    before = log.level
    try:
        assert run("model", "list").err.count("the server is slow") == 1
    finally:
        log.setLevel(before)  # TINKER_LOG sets it for the process


def test_a_program_with_own_log_warns_once(run: Run, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])

    def warn(*_: object) -> None:
        logging.getLogger("tinker_sync.session").warning("slow")

    monkeypatch.setattr("tinker_sync.clients.service.ServiceClient.get_server_capabilities", warn)
    assert "Warning" not in run("model", "list").err


def test_the_demo_fails_if_the_model_learned_too_little(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome, code in ((True, 0), (False, 1)):
        monkeypatch.setattr("tinker_sync.examples.demo.main", lambda outcome=outcome: outcome)
        done = run("demo")
        assert done.code == code
        assert ("did not learn enough" in done.err) is not outcome


@pytest.mark.parametrize("option", [("--format", "json"), ("--base-url", "http://localhost:1")])
def test_the_demo_refuses_what_a_copy_of_it_can_do(run: Run, option: tuple[str, str]) -> None:
    done = run("demo", *option)
    assert done.code == 2
    assert "copy tinker_sync/examples/demo.py" in done.err


def test_only_the_hosted_service_has_a_console() -> None:
    with StubServer() as stub, ServiceClient(base_url=stub.url, api_key="tml-x") as service:  # type: ignore[attr-defined]
        assert service.get_console_url() == stub.url  # type: ignore[attr-defined]
        training = service.create_lora_training_client("stub/model")  # type: ignore[attr-defined]
        assert training.get_console_url() == stub.url
    with ServiceClient(base_url=None, api_key="tml-x") as service:
        assert service.get_console_url().endswith("/sessions")
        hosted = TrainingClient(service.holder, 0)
        hosted._line.model_id = "run-1"
        hosted._become_ready()
        assert hosted.get_console_url().endswith("/training_runs/run-1")


def test_checkpoints_of_open_servers_without_a_folder(run: Run, world: World) -> None:
    world.script("/training_runs/r/checkpoints/sampler_weights/final", Answer(204))
    done = run("checkpoint", "delete", "tinker://r/final", "--yes", "--base-url", world.url)  # type: ignore[attr-defined]
    assert done.code == 0, done.err
    assert [asked.method for asked in world.asked("/training_runs/r/checkpoints/sampler_weights/final")] == [
        "DELETE"
    ]
    hosted = run("checkpoint", "delete", "tinker://r/final", "--yes", "--base-url", DEFAULT_BASE_URL)
    assert hosted.code == 1
    assert "expected tinker://RUN/FOLDER/NAME" in hosted.err
