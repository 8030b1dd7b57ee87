"""`tinker-sync gateway` as a process: it serves until a signal, and leaves a file of exchanges."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from support.cli_runs import Run

import tinker_sync
from tinker_sync.gateway import read_exchanges, to_trajectories
from tinker_sync.testing import LocalServer

MODEL = "tinker-sync/tiny"
ROOT = Path(tinker_sync.__file__).parents[1]


def chat(url: str, key: str) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": "What is 23+45?"}], "temperature": 0})
    headers = {"Authorization": f"Bearer {key}"}
    with urlopen(Request(f"{url}/chat/completions", body.encode(), headers)) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(number: int, tmp_path: Path) -> None:
    record = tmp_path / "exchanges.jsonl"
    with LocalServer() as server:
        command = ["-m", "tinker_sync", "gateway", "--model", MODEL, "--record", str(record), "-f", "json"]
        process = subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            env=os.environ
            | {**server.environment(), "PYTHONPATH": str(ROOT), "TINKER_GATEWAY_KEY": "a key of the test"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            try:
                shown = json.loads(process.stdout.readline())
                assert chat(shown["openai_base_url"], "a key of the test") == "23+45=68"
                process.send_signal(number)
                rest, complaints = process.communicate(timeout=60)
            finally:
                process.kill()
    assert (process.returncode, rest, complaints) == (0, "", "")
    [trajectory] = to_trajectories(read_exchanges(record))
    assert trajectory.messages[-1]["content"] == "23+45=68"


def test_a_wrong_command_line_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("gateway").code == 2
    assert run("gateway", "--model", MODEL, "--model-path", "tinker://a/sampler_weights/b").code == 2
    missing = str(tmp_path / "none")
    ran = run("gateway", "--model", MODEL, "--key-file", missing)
    assert (ran.code, missing in ran.err) == (1, True)


def test_other_machines_need_a_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", server.key)
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        ran = run("gateway", "--model", MODEL, "--host", "0.0.0.0")
    assert (ran.code, "16 characters" in ran.err) == (1, True)
    # Else a program that has run the command would take no Ctrl-C any more.
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
