"""Clients in other surroundings: forked and started processes, threads of a web server, event loops."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest
from support.crowd import together, until
from support.isolation import our_threads
from support.scripts import Script
from support.servers import AnsweringServer, Seen, answer
from support.tinker_stub import Answer, Asked, Stub

import tinker_sync
from tinker_sync import types
from tinker_sync.clients._base import SharedRuntimes
from tinker_sync.clients.rest import RestClient
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.config import Settings
from tinker_sync.errors import ClientClosedError
from tinker_sync.runtime.client import ClientRuntime

BLOCK = 10**9
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})


def numbers(requests: list[Asked]) -> list[int]:
    return [asked.json()["seq_id"] for asked in requests]


# ---------------------------------------------------------------------------------------------- fork

FORK = """
import warnings
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # what this is about
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
sampler = service.create_sampling_client(base_model="stub/model")
trainer = service.create_lora_training_client("stub/model")

def sample():
    return sampler.sample(PROMPT, 1, PARAMS).result(120).sequences[0].tokens

def threads():
    names = {thread.name.rstrip("-0123456789") for thread in threading.enumerate()}
    return sorted(name for name in names if name.startswith("tinker-"))

say(sample(), trainer.optim_step(types.AdamParams()).result(120).metrics)
"""

ERRORS = "from tinker_sync.errors import TinkerError as types_error\n"


def test_a_forked_child_has_threads_connections_and_numbers_of_its_own(stub: Stub) -> None:
    text = """
    hear()
    slow = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]
    hear()
    pid = os.fork()
    if pid == 0:
        say("alive:", threads())
        say(sample(), service.get_server_capabilities().supported_models[0].model_name)
        say("alive:", threads())
        try:
            slow[0].result(120)
        except types_error as error:
            say(type(error).__name__, error)
        with service:
            service.create_lora_training_client("stub/model").result(120)
        try:
            sample()
        except RuntimeError as error:
            say(type(error).__name__)
    else:
        say("child:", os.waitpid(pid, 0)[1])
        hear()
        say(sample(), [future.result(120).sequences[0].tokens for future in slow] == [[6, 7]] * 10)
        say(trainer.optim_step(types.AdamParams()).result(120).metrics)
    """
    with Script(FORK + ERRORS + dedent(text), URL=stub.url, unhurried=True) as script:
        assert script.hear() == "[6, 7] {'step:max': 1.0}"
        release = stub.hold("/retrieve_future", 10)
        script.say("sample")
        stub.await_asked("/retrieve_future", 3 + 10)
        before = len(stub.log)
        script.say("fork")
        assert script.hear() == "alive: []"
        assert script.hear() == "[6, 7] stub/model"
        assert "tinker-heartbeat" in script.hear()
        assert script.hear().startswith("TinkerError this call was made before the process was forked")
        assert script.hear() == "ClientClosedError"
        assert script.hear() == "child: 0"
        after = len(stub.log)
        release.set()
        script.say("go on")
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out[-2:] == ["[6, 7] True", "{'step:max': 2.0}"]

    parents, childs = [*stub.log[:before], *stub.log[after:]], stub.log[before:after]
    assert not {asked.connection for asked in parents} & {asked.connection for asked in childs}
    of_samples = [asked for asked in childs if asked.path.endswith("/asample")]
    assert all(BLOCK <= number < (BLOCK + 1) * BLOCK for number in numbers(of_samples))
    assert len(of_samples) == 1
    made = [asked.json()["model_seq_id"] for asked in childs if asked.path.endswith("/create_model")]
    assert len(made) == 1
    assert made[0] >= 10**6  # far above the numbers of the parent
    # The session belongs to the parent, which reports its end once.
    finished = stub.asked("/sessions/session-0/finish")
    assert [asked.json()["reason"]["type"] for asked in finished] == ["success"]
    assert finished[0] in stub.log[after:]


def test_a_child_cancels_no_call_of_its_parent_and_waits_for_no_client_of_it(stub: Stub) -> None:
    stub.behaviour.dynamic_config = {"sample_cancel_enabled": True}
    text = """
    hear()
    slow, new = sampler.sample(PROMPT, 1, PARAMS), service.create_sampling_client(base_model="stub/model")
    both, held = sampler.compute_logprobs(PROMPT), new.sample(PROMPT, 1, PARAMS)
    hear()
    pid = os.fork()
    if pid == 0:
        say([future.cancel() for future in (slow, both, held, new)], slow.done())
        for call in (lambda: new.sample(PROMPT, 1, PARAMS), lambda: new.result(120)):
            try:
                call()
            except types_error as error:
                say(error)
        say(sample())
    else:
        say("child:", os.waitpid(pid, 0)[1])
        hear()
        say(slow.result(120).sequences[0].tokens, both.result(120), held.result(120).sequences[0].tokens)
    """
    with Script(FORK + ERRORS + dedent(text), URL=stub.url, unhurried=True) as script:
        assert script.hear() == "[6, 7] {'step:max': 1.0}"
        releases = [stub.hold("/retrieve_future", 2), stub.hold("/create_sampling_session")]
        script.say("sample")
        stub.await_asked("/retrieve_future", 2 + 2)
        stub.await_asked("/create_sampling_session", 2)
        script.say("fork")
        assert script.hear() == "[False, False, False, False] False"
        for _ in range(2):
            assert "call .result() on it before the fork" in script.hear()
        assert [script.hear(), script.hear()] == ["[6, 7]", "child: 0"]
        for release in releases:
            release.set()
        script.say("go on")
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")
    assert (ended.out[-1][:8], ended.out[-1][-8:]) == ("[6, 7] [", "] [6, 7]")
    assert stub.asked("/cancel_future") == []


def test_a_child_asks_for_the_samples_of_a_session_that_are_its_own(stub: Stub) -> None:
    stub.behaviour.config = {"sample_use_retrieve_futures": True}
    text = """
    hear()
    slow = sampler.sample(PROMPT, 1, PARAMS)
    hear()
    pid = os.fork()
    if pid == 0:
        say(sample(), sample())
        service.close().result(120)
        os._exit(0)
    say("child:", os.waitpid(pid, 0)[1])
    hear()
    say(slow.result(120).sequences[0].tokens)
    """
    with Script(FORK + ERRORS + dedent(text), URL=stub.url, unhurried=True) as script:
        assert script.hear() == "[6, 7] {'step:max': 1.0}"
        before = len(stub.asked("/retrieve_futures"))
        release = stub.hold("/retrieve_futures", 1)
        script.say("sample")
        stub.await_asked("/retrieve_futures", before + 1)
        script.say("fork")
        assert script.hear() == "[6, 7] [6, 7]"
        assert script.hear() == "child: 0"
        release.set()
        script.say("go on")
        assert script.hear() == "[6, 7]"
        assert script.wait().code == 0
    asked = [each.json()["target"]["cloned_sampler_id"] for each in stub.asked("/retrieve_futures")]
    assert set(asked[: before + 1]) == {0}
    assert len(set(asked[before + 1 :]) - {0}) == 1  # the child asks under a number of its own


def test_a_child_may_take_over_when_its_parent_leaves(stub: Stub) -> None:
    """A program forks as daemons do: the parent leaves silently, and the child takes the client over."""
    text = """
    hear()
    if os.fork():
        os._exit(0)
    try:
        trainer.optim_step(types.AdamParams())
    except types_error as error:
        say(error)
    trainer.take_over()
    say(trainer.optim_step(types.AdamParams()).result(120).metrics, threads())
    sampler = trainer.save_weights_and_get_sampling_client()
    say(sample())
    """
    with Script(FORK + ERRORS + dedent(text), URL=stub.url) as script:
        script.hear()
        script.say("fork")
        assert "training.take_over()" in script.hear()
        said = script.hear()
        assert said.startswith("{'step:max': 2.0}")
        assert "tinker-heartbeat" in said
        assert script.hear() == "[6, 7]"


def test_two_copies_of_a_training_client_never_send_under_one_number(stub: Stub) -> None:
    text = """
    def attempt(call):
        try:
            return call().result(120).metrics
        except types_error as error:
            return type(error).__name__
    def step():
        return trainer.optim_step(types.AdamParams())
    pid = os.fork()
    if pid == 0:
        say(attempt(step), attempt(lambda: trainer.save_state("a")), sample())
        os._exit(0)
    os.waitpid(pid, 0)
    say(attempt(step))
    hear()
    pending = step()
    hear()
    if os.fork() == 0:
        try:
            trainer.take_over()
        except types_error as error:
            say(type(error).__name__, "under way" in str(error), attempt(step))
        os._exit(0)
    os.wait()
    say(attempt(lambda: pending), attempt(step))
    """
    with Script(FORK + ERRORS + dedent(text), URL=stub.url) as script:
        script.hear()
        assert script.hear() == "TinkerError TinkerError [6, 7]"
        assert script.hear() == "{'step:max': 2.0}"
        release = stub.hold("/optim_step")
        script.say("step")
        stub.await_asked("/optim_step", 3)
        script.say("fork")
        assert script.hear() == "EarlierCallFailedError True EarlierCallFailedError"
        release.set()
        assert script.hear() == "{'step:max': 3.0} {'step:max': 4.0}"
        assert script.wait().code == 0
    assert numbers(stub.asked("/optim_step")) == [1, 2, 3, 4]
    assert stub.asked("/save_weights") == []


def test_a_fork_in_the_midst_of_sending_leaves_a_working_child(stub: Stub) -> None:
    """A child works, although threads of the parent may hold locks of the client when it forks."""
    text = """
    futures = []
    def submit():
        while not done.is_set():
            futures.append(sampler.sample(PROMPT, 1, PARAMS))
            futures[-1].result(120)
    done = threading.Event()
    submitters = [threading.Thread(target=submit) for _ in range(4)]
    for thread in submitters:
        thread.start()
    codes = []
    for _ in range(15):
        pid = os.fork()
        if pid == 0:
            signal.alarm(15)  # a child that hangs is killed
            ok = sample() == [6, 7]
            service.close().result(120)
            os._exit(0 if ok else 1)
        codes.append(os.waitpid(pid, 0)[1])
    done.set()
    for thread in submitters:
        thread.join()
    say(codes, sample())
    """
    with Script(FORK + dedent(text), URL=stub.url) as script:
        script.hear()
        assert script.hear() == f"{[0] * 15} [6, 7]"
        assert script.wait().err == ""
    clones = {number // BLOCK for number in numbers(stub.asked("/asample"))}
    assert len(clones) == 1 + 15  # no two processes used the same numbers


# ---------------------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_sampling_client_works_in_started_processes(stub: Stub, method: str) -> None:
    text = f"""
    import multiprocessing, pickle, warnings
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    from support.scripts import sample_twice
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    sampler = service.create_sampling_client(base_model="stub/model")
    own = sample_twice(sampler)
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        others = pool.map(sample_twice, [sampler, sampler], chunksize=1)
    say(own[1], [sampled for _, sampled in others], own[0] in [pid for pid, _ in others])
    """
    with Script(text, URL=stub.url) as script:
        expected = [[6, 7], [6, 7]]
        assert script.hear() == f"{expected} {[expected] * 2} False"
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")
    clones = [number // BLOCK for number in numbers(stub.asked("/asample"))]
    assert len(set(clones)) == 3
    assert 0 in clones
    # The copies made no session and asked for no settings.
    assert len(stub.asked("/create_session")) == len(stub.asked("/client/config")) == 1


def test_a_copy_keeps_the_session_alive_from_where_it_is(stub: Stub, service: ServiceClient) -> None:
    handle = service.create_sampling_client(base_model="stub/model").result().get_sampler_handle()
    text = f"""
    from tinker_sync.clients.sampling import SamplingClient
    sampler = SamplingClient.from_sampler_handle({handle!r})
    say([thread.name for thread in threading.enumerate()])
    sampler.sample(PROMPT, 1, PARAMS).result(120)
    say("tinker-heartbeat" in [thread.name for thread in threading.enumerate()])
    """
    with Script(text) as script:
        assert script.hear() == "['MainThread']"
        assert script.hear() == "True"
        script.wait()
    # It is not the copy's to end.
    assert stub.asked("/sessions/session-0/finish") == []


# ---------------------------------------------------------------------------------------------- loops


def test_handlers_of_a_web_server_share_a_client(stub: Stub, service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="stub/model").result()

    def handle(seen: Seen) -> bytes:
        prompt = types.ModelInput.from_ints([int(part) for part in seen.target.strip("/").split(",")])
        sampled = sampler.sample(prompt, 1, PARAMS).result(120)
        return answer(json.dumps(list(sampled.sequences[0].tokens)).encode())

    with AnsweringServer(handle) as server:  # a thread for each connection

        def ask(first: int) -> list[int]:
            with urllib.request.urlopen(f"{server.url}/{first},1") as reply:
                found: list[int] = json.loads(reply.read())
                return found

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(64)))
    assert answers == [[first + 1, first + 2] for first in range(64)]
    assert sorted(numbers(stub.asked("/asample"))) == list(range(64))


def test_both_kinds_of_calls_work_inside_a_running_loop(stub: Stub, service: ServiceClient) -> None:
    async def script() -> list[object]:
        sampler = await service.create_sampling_client_async(base_model="stub/model")
        trainer = await service.create_lora_training_client_async("stub/model")
        blocking = sampler.sample(PROMPT, 1, PARAMS).result(120)
        awaited = await sampler.sample_async(PROMPT, 1, PARAMS)
        directly = await sampler.sample(PROMPT, 1, PARAMS)
        many = await asyncio.gather(*(sampler.sample_async(PROMPT, 1, PARAMS) for _ in range(50)))
        step = await trainer.forward_backward_async([DATUM], "cross_entropy")
        done = await trainer.optim_step_async(types.AdamParams())
        results = [await step, await done, await trainer.get_info_async()]
        again = await trainer.save_weights_and_get_sampling_client_async()
        scored = await again.compute_logprobs_async(PROMPT)
        tokens = {tuple(each.sequences[0].tokens) for each in (blocking, awaited, directly, *many)}
        return [tokens, [type(each).__name__ for each in results], len(scored)]

    assert asyncio.run(script()) == [
        {(6, 7)},
        ["ForwardBackwardOutput", "OptimStepResponse", "GetInfoResponse"],
        3,
    ]


def test_an_awaited_call_that_blocks_leaves_the_loop_free(stub: Stub, service: ServiceClient) -> None:
    trainer = service.create_lora_training_client("stub/model").result()
    release = stub.hold("/save_weights_for_sampler")

    async def script() -> int:
        turns = 0
        saving = asyncio.ensure_future(trainer.save_weights_and_get_sampling_client_async())
        await asyncio.to_thread(stub.await_asked, "/save_weights_for_sampler")
        for _ in range(100):
            turns += not saving.done()
            await asyncio.sleep(0)
        release.set()
        await saving
        return turns

    assert asyncio.run(script()) == 100


def test_what_an_awaited_call_raises_and_where_it_runs(stub: Stub, service: ServiceClient) -> None:
    class Mine(ServiceClient):
        def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
            raise KeyError(threading.current_thread().name)

    mine = Mine(base_url=stub.url, api_key="tml-x")
    with pytest.raises(KeyError, match="tinker-await-1"):
        asyncio.run(mine.get_server_capabilities_async())
    mine.close().result(120)
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(mine.get_server_capabilities_async())


# ---- Programs that run the user's code in their own processes: notebooks, pytest-xdist, servers that fork
ROOT = Path(tinker_sync.__file__).parents[1]


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


# ----- Clients of one process share their parts: one close ends all, and a forked child has its own
def runtime_of(stub: Stub) -> ClientRuntime:
    return ClientRuntime(Settings.resolve(base_url=stub.url, api_key="tml-x", environ={}))


def test_one_core_is_made_for_each_key(stub: Stub) -> None:
    shared = SharedRuntimes({})
    runtimes = together(*[lambda: shared.get("a", lambda: runtime_of(stub))] * 16)
    assert len({id(runtime) for runtime in runtimes}) == 1
    assert shared.get("b", lambda: runtime_of(stub)) is not runtimes[0]


def test_a_child_is_not_stopped_by_a_lock_of_the_parents(stub: Stub) -> None:
    shared = SharedRuntimes({})
    shared._shared._lock.acquire()
    shared._shared.renew_after_fork()
    shared.get("a", lambda: runtime_of(stub))


def test_handles_of_one_session_share_their_parts_while_they_live(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url, api_key="tml-x")
    handle = service.create_sampling_client(base_model="stub/model").result().get_sampler_handle()
    copies = [SamplingClient.from_sampler_handle(handle, api_key="tml-x") for _ in range(3)]
    assert len({id(copy.holder) for copy in copies}) == 1
    for copy in copies:
        copy.sample(PROMPT, 1, PARAMS).result(120)
    assert sum(thread.name == "tinker-heartbeat" for thread in our_threads()) == 2
    runtime = weakref.ref(copies[0].holder)
    del copies, copy
    gc.collect()
    assert runtime() is None
    service.close().result(120)
    until(lambda: our_threads() == set())


def test_pickles_of_one_client_share_a_copy(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    service = ServiceClient(base_url=stub.url, api_key="tml-x")
    sampler = service.create_sampling_client(base_model="stub/model").result()
    first, second = (pickle.loads(pickle.dumps(sampler)) for _ in range(2))
    assert first is second is not sampler
    first.holder.close("success").result(120)
    third = pickle.loads(pickle.dumps(sampler))
    assert third is not first
    third.sample(PROMPT, 1, PARAMS).result(120)
    monkeypatch.setenv("TINKER_API_KEY", "tml-y")
    assert pickle.loads(pickle.dumps(sampler)).holder is not third.holder
    third.holder.close("success").result(120)
    service.close().result(120)


def test_clients_of_one_server_and_key_ask_for_its_settings_once(stub: Stub) -> None:
    clients = [RestClient(base_url=stub.url, api_key="tml-x") for _ in range(3)]
    for client in clients:
        client.list_training_runs().result(120)
    other = RestClient(base_url=stub.url, api_key="tml-y")
    other.list_training_runs().result(120)
    assert len(stub.asked("/client/config")) == 2
    for client in (clients[0], other):
        client.holder.close().result(120)


def test_closing_ends_calls_of_every_kind_of_client(stub: Stub) -> None:
    client = RestClient(base_url=stub.url, api_key="tml-x")
    stub.script("/training_runs", *[Answer(status=0)] * 30)
    futures = [client.list_training_runs() for _ in range(30)]  # more than there are workers
    stub.await_asked("/training_runs", 8)
    client.holder.close().result(120)
    assert [type(future.exception(120)) for future in futures] == [ClientClosedError] * 30
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.list_training_runs()


def test_a_callback_is_called_although_the_client_was_closed(stub: Stub) -> None:
    client = RestClient(base_url=stub.url, api_key="tml-x")
    stub.script("/training_runs", *[Answer(status=0)] * 20)
    heard = [threading.Event() for _ in range(20)]
    for event in heard:
        client.list_training_runs().add_done_callback(lambda _, event=event: event.set())  # type: ignore[misc]
    client.holder.close().result(120)
    assert all(event.wait(120) for event in heard)
