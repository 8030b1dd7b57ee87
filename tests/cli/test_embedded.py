"""Every command against the embedded server, from login to logout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from support.cli_runs import Run

import tinker_sync
from tinker_sync.testing import LocalServer
from tinker_sync.types import Datum, ModelInput

MODEL = "tinker-sync/random"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalServer]:
    monkeypatch.chdir(tmp_path)
    with LocalServer(model=MODEL, pjwt_auth_enabled=True) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        yield server


@pytest.fixture
def run_id(server: LocalServer) -> str:
    with server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=2).result()
        datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1, 1, 1]})
        training.forward_backward([datum], "cross_entropy").result(120)
        training.save_state("a").result(120)
        training.save_state("b").result(120)
        training.save_weights_for_sampler("s").result(120)
        return training.model_id


def test_every_command(run: Run, server: LocalServer, run_id: str) -> None:
    path, sampler = f"tinker://{run_id}/weights/a", f"tinker://{run_id}/sampler_weights/s"
    hour = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    window = tuple(f"{hour + timedelta(hours=away):%Y-%m-%dT%H:00:00Z}" for away in (-1, 2))
    lines: list[tuple[tuple[str, ...], str]] = [
        (("version",), "tinker-sync "),
        (("auth", "status"), "Tinker accessible: yes"),
        (("auth", "whoami"), "Organization"),
        (("model", "list"), MODEL),
        (("run", "list"), run_id),
        (("run", "info", run_id), "rank 2"),
        (("session", "list"), run_id.partition(":")[0]),
        (("checkpoint", "list"), path),
        (("checkpoint", "list", "--run-id", run_id), sampler),
        (("checkpoint", "info", path), "training"),
        (("checkpoint", "publish", path), ""),
        (("checkpoint", "unpublish", path), ""),
        (("checkpoint", "set-ttl", path, "--ttl", "7200"), ""),
        (("checkpoint", "download", path), "Saved to"),
        (("sample", "1 2 3", "--tokens", "--model", MODEL, "--max-tokens", "3"), " "),
        (("sample", "1 2 3", "--tokens", "--path", sampler, "-n", "2", "--max-tokens", "2"), "2 tokens"),
        (("billing", "usage", *window), "training"),
        (("billing", "checkpoint-storage"), "checkpoints in storage"),
        (("session", "export-trace", run_id.partition(":")[0]), "Saved to"),
        (("probe",), "asample"),
        (("doctor",), "the server accepts the key"),
        (("checkpoint", "delete", "-y", path), ""),
    ]
    login = run("auth", "login", stdin=f"{server.key}\n")
    assert login.code == 0, login.err
    for line, shown in lines:
        done = run(*line)
        assert done.code == 0, (line, done.err)
        assert shown in done.out, line
    left = run("checkpoint", "list", "-f", "jsonl").lines
    assert {each["checkpoint_id"] for each in left} == {"weights/b", "sampler_weights/s"}
    assert run("auth", "logout").code == 0
    assert run("auth", "status").code == 1


def test_serve(run: Run, tmp_path: Path) -> None:
    """`serve` prints its address and its key, answers commands, and ends with Ctrl-C."""
    serve = [sys.executable, "-m", "tinker_sync", "serve", "--data-dir", str(tmp_path / "data"), "--show-key"]
    with subprocess.Popen(
        [*serve, "--format", "json"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        try:
            served = json.loads(process.stdout.readline())
            assert served["key"].startswith("tml-")
            # The command finds the key of this server by its address.
            shown = run("--base-url", served["base_url"], "model", "list")
            assert shown.code == 0, shown.err
            assert "tinker-sync/tiny" in shown.out
            line = ("sample", "3 + 4 =", "--model", "tinker-sync/tiny", "--temperature", "0", "-f", "jsonl")
            sampled = run(*line, "--base-url", served["base_url"])
            assert sampled.code == 0, sampled.err
            [item] = sampled.lines
            assert item["tokens"]
            assert isinstance(item["text"], str)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(120)
    assert code in (0, 130)


ROOT = Path(tinker_sync.__file__).parents[1]
