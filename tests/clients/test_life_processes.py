"""Clients in other surroundings: forked and started processes, threads of a web server, event loops."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent

import pytest
from support.scripts import Script
from support.servers import AnsweringServer, Seen, answer
from support.tinker_stub import Asked, Stub

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient

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
    from support.elsewhere import sample_twice
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
