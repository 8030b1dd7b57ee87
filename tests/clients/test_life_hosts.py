"""Programs that run the user's code in their own processes: notebooks, pytest-xdist, servers that fork."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from textwrap import dedent

import pytest
from support.scripts import Script
from support.tinker_stub import Answer, Stub

import tinker_sync

ROOT = Path(tinker_sync.__file__).parents[1]
BLOCK = 10**9


def needs(*packages: str) -> pytest.MarkDecorator:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"without {', '.join(absent)}")


# ---------------------------------------------------------------------------------------------- notebooks

NOTEBOOK = """
from jupyter_client.manager import KernelManager

START = '''
import os
from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
sampler = service.create_sampling_client(base_model="stub/model")
sampler.sample(PROMPT, 1, PARAMS).result(120)
'''
SAMPLE = "print(sampler.sample(PROMPT, 1, PARAMS).result(120).sequences[0].tokens)"

manager = KernelManager(kernel_name="python3")
manager.start_kernel()
client = manager.blocking_client()
client.start_channels()
client.wait_for_ready(timeout=120)

# After a cell that fails, a kernel aborts cells that come at once, unless `stop_on_error` is off.
def run(cell, *, wait=True):
    if not wait:
        return client.execute(cell, stop_on_error=False)
    words = []
    def hear_output(message):
        if message["msg_type"] == "stream":
            words.append(message["content"]["text"].strip())
    reply = client.execute_interactive(
        cell, timeout=120, output_hook=hear_output, stop_on_error=False
    )["content"]
    say(reply.get("ename", reply["status"]), *words)

run(START)
run("kept = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]")
say("ready")
hear()
number = run(SAMPLE, wait=False)
hear()
manager.interrupt_kernel()
while client.get_shell_msg(timeout=120)["parent_header"].get("msg_id") != number:
    pass
say("interrupted")
hear()
run(SAMPLE)
run("print([each.result(120).sequences[0].tokens for each in kept])")
run("late = sampler.sample(PROMPT, 1, PARAMS)")
manager.restart_kernel()
client.wait_for_ready(timeout=120)
run("sampler")
run(START)
run(SAMPLE)
client.stop_channels()
manager.shutdown_kernel()
"""


@needs("ipykernel", "jupyter_client")
def test_the_kernel_of_a_notebook_is_interrupted_and_restarted(stub: Stub) -> None:
    with Script(NOTEBOOK, strict=False, URL=stub.url) as script:  # type: ignore[attr-defined]
        assert [script.hear(), script.hear()] == ["ok", "ok"]
        assert script.hear() == "ready"
        stub.await_asked("/retrieve_future", 1 + 3)
        stub.script("/retrieve_future", Answer(status=0))  # it never answers
        script.say("run the cell")
        stub.await_asked("/retrieve_future", 1 + 3 + 1)
        script.say("interrupt")
        assert script.hear() == "interrupted"
        script.say("next cell")
        assert script.hear() == "ok [6, 7]"
        assert script.hear() == f"ok {[[6, 7]] * 3}"
        assert script.hear() == "ok"
        assert script.hear() == "NameError"
        assert [script.hear(), script.hear()] == ["ok", "ok [6, 7]"]
        assert script.wait().code == 0
    # Each of the two kernels had one session and ended it.
    assert len(stub.asked("/create_session")) == 2
    assert sum(path.endswith("/finish") for path in stub.paths()) == 2


# ---------------------------------------------------------------------------------------------- web servers

APP = """
import json, os
from tinker_sync import types
from tinker_sync.clients.service import ServiceClient

PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
sampler = service.create_sampling_client(base_model="stub/model")
sampler.sample(PROMPT, 1, PARAMS).result(120)

def app(environ, start_response):
    sampled = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    tokens = [list(each.result(120).sequences[0].tokens) for each in sampled]
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps([os.getpid(), tokens]).encode()]
"""


@needs("gunicorn")
def test_gunicorn_forks_workers_from_a_process_that_has_sampled(stub: Stub, tmp_path: Path) -> None:
    (tmp_path / "web.py").write_text(APP)
    command = [sys.executable, "-m", "gunicorn", "web:app", "--preload", "--workers", "2", "--threads", "2"]
    server = subprocess.Popen(
        [*command, "--bind", "127.0.0.1:0", "--timeout", "120", "--worker-tmp-dir", str(tmp_path)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "URL": stub.url},  # type: ignore[attr-defined]
    )
    assert server.stderr is not None
    with server, server.stderr as words:
        try:
            addresses = (re.search(r"Listening at: (http://\S+)", line) for line in words)
            address = next(found[1] for found in addresses if found is not None)
            answers = []
            while len({pid for pid, _ in answers}) < 2 and len(answers) < 200:
                with urllib.request.urlopen(address, timeout=120) as reply:
                    answers.append(tuple(map(str, json.load(reply))))
            server.send_signal(signal.SIGTERM)
            rest = words.read()
            assert server.wait(120) == 0
        finally:
            server.kill()
    assert {tokens for _, tokens in answers} == {str([[6, 7]] * 3)}
    assert str(server.pid) not in {pid for pid, _ in answers}
    assert "Traceback" not in rest
    # No two processes used the same numbers, and the one that made the session has ended it.
    numbers = [asked.json()["seq_id"] for asked in stub.asked("/asample")]
    assert len(numbers) == len(set(numbers)) == 1 + 3 * len(answers)
    assert {number // BLOCK for number in numbers} >= {0}
    assert len({number // BLOCK for number in numbers}) == 1 + len({pid for pid, _ in answers})
    assert len(stub.asked("/create_session")) == 1


# ---------------------------------------------------------------------------------------------- test runners

TESTS = """
import pytest
from tinker_sync import types

@pytest.fixture(scope="session")
def tinker_server_options():
    return {"model": "tinker-sync/random"}

@pytest.mark.parametrize("turn", range(2))
def test_trains_and_samples(turn, tinker_service, worker_id):
    assert worker_id != "master"
    training = tinker_service.create_lora_training_client("tinker-sync/random", rank=1)
    assert training.optim_step(types.AdamParams()).result(120).metrics
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result(120)
    assert len(sampled.sequences[0].tokens) == 2
"""


@needs("xdist")
def test_the_processes_of_pytest_xdist(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(dedent(TESTS))
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-q", "-p", "no:cacheprovider"]
    plugin = ["-p", "no:tinker_sync", "-p", "tinker_sync.testing.pytest_plugin", "-W", "error"]
    ended = subprocess.run(
        [*command, *plugin, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    assert "2 passed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 0
