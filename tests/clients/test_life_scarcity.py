"""Without files, threads or memory, calls wait or fail with an error that names the cause; none hangs."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
from support.custom_losses import arrived, world
from support.raising import raising
from support.scripts import Script
from support.tinker_stub import Stub

from tinker_sync import types
from tinker_sync.errors import TinkerError
from tinker_sync.runtime.lazy import HeldCalls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sets limits that only Linux keeps")

START = """
import resource

def limit(kind, amount):
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, most))

limit(resource.RLIMIT_NOFILE, int(os.environ["FILES"]))
threading.stack_size(1 << 18)  # threads that end give back little of the address space
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
sampler = service.create_sampling_client(base_model="stub/model")
trainer = service.create_lora_training_client("stub/model")
STEP = types.AdamParams()

def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

def stop_threads():
    # The limit comes first: a thread that begins with too little memory hangs the thread that starts it.
    limit(resource.RLIMIT_AS, memory() + (1 << 29))
    return threading.stack_size(1 << 30)

def name_of(call):
    try:
        call().result(120)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "a result"

def sample():
    return sampler.sample(PROMPT, 1, PARAMS)
"""


LARGE = """
import numpy as np
long = np.full(8_000_000, 7)
inputs = {"target_tokens": long, "weights": long * 1.0}
large = [types.Datum(types.ModelInput.from_ints(long), inputs)]
"""


def run(stub: Stub, text: str, files: int = 1024) -> Script:
    return Script(
        START + LARGE * ("large" in text) + dedent(text), URL=stub.url, FILES=str(files), MALLOC_ARENA_MAX="1"
    )


def test_with_64_files_many_samples_take_turns(stub: Stub) -> None:
    stub.behaviour.latency_s = 0.01
    text = """
    sampled = [sample() for _ in range(300)]
    stepped = [trainer.optim_step(STEP) for _ in range(5)]
    say({tuple(each.result(120).sequences[0].tokens) for each in sampled})
    say([each.result(120).metrics["step:max"] for each in stepped])
    """
    with run(stub, text, files=64) as script:
        assert script.hear() == "{(6, 7)}"
        assert script.hear() == "[1.0, 2.0, 3.0, 4.0, 5.0]"
        ended = script.wait()
    assert ended.code == 0
    assert ended.err.startswith("32 requests are under way, and others wait for a connection")
    assert ended.err.count("\n") == 1


def test_without_a_single_file_calls_fail_by_name_and_later_ones_succeed(stub: Stub) -> None:
    text = """
    say(name_of(sample), name_of(lambda: trainer.optim_step(STEP)))
    service.holder.connection.http.forget_idle()
    taken = [os.open(os.devnull, os.O_RDONLY)]
    limit(resource.RLIMIT_NOFILE, taken[0] + 1)
    say(name_of(lambda: sampler.sample(PROMPT, 1, PARAMS, deadline=1.0)))
    limit(resource.RLIMIT_NOFILE, 1024)
    say(name_of(sample), name_of(lambda: trainer.optim_step(STEP)))
    """
    with run(stub, text) as script:
        assert script.hear() == "a result a result"
        assert "Too many open files" in script.hear()
        assert script.hear() == "a result a result"
        assert script.wait().code == 0


@pytest.mark.parametrize("warm", [False, True], ids=["from-the-start", "in-the-midst"])
def test_without_another_thread_calls_fail_by_name_or_go_on(stub: Stub, *, warm: bool) -> None:
    text = f"""
    if {warm}:
        sampler.result(120), trainer.result(120), sample().result(120)
    usual = stop_threads()
    try:
        threading.Thread(target=print).start()
    except RuntimeError as error:
        say(error)
    first = name_of(sample), name_of(lambda: trainer.optim_step(STEP))
    limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    threading.stack_size(usual)
    say("; ".join(first))
    sampler = service.create_sampling_client(base_model="stub/model")
    trainer = service.create_lora_training_client("stub/model")
    say(name_of(sample), name_of(lambda: trainer.optim_step(STEP)))
    """
    with run(stub, text) as script:
        assert script.hear() == "can't start new thread"
        for word in script.hear().split("; "):
            assert word == "a result" or "can't start new thread" in word
        assert script.hear() == "a result a result"
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")


def test_a_chunk_for_which_no_thread_starts_fails_alone(stub: Stub) -> None:
    text = """
    say(name_of(sample), name_of(lambda: trainer))  # no thread for chunks has started yet
    usual = stop_threads()
    refused = name_of(lambda: trainer.forward_backward(large, "cross_entropy"))
    limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    threading.stack_size(usual)
    say(refused)
    say(name_of(lambda: trainer.forward_backward(large, "cross_entropy")))
    say(name_of(lambda: trainer.optim_step(STEP)))
    """
    with run(stub, text) as script:
        assert script.hear() == "a result a result"
        assert script.hear() == "TinkerError: no thread for this call: can't start new thread"
        assert script.hear() == "a result"
        assert script.hear() == "a result"
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")


def test_a_call_that_needs_more_memory_than_there_is_fails_alone(stub: Stub) -> None:
    text = """
    data = [types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})]
    say(name_of(sample), name_of(lambda: trainer.forward_backward(data, "cross_entropy")))
    sampled = [sample() for _ in range(50)]
    limit(resource.RLIMIT_AS, memory() + (1 << 24))  # enough for the threads of the samples
    refused = name_of(lambda: trainer.forward_backward(large, "cross_entropy"))
    limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    say(refused)
    say({tuple(each.result(120).sequences[0].tokens) for each in sampled})
    say(name_of(lambda: trainer.optim_step(STEP)))
    """
    with run(stub, text) as script:
        assert script.hear() == "a result a result"
        assert "memory" in script.hear().lower()  # for the chunk, or for its result
        assert script.hear() == "{(6, 7)}"
        assert script.hear() == "a result"
        assert script.wait().code == 0


def test_a_call_that_no_thread_starts_is_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client becomes ready between two steps of the call, which a worker then starts."""
    with world() as (stub, trainer):
        pool = trainer.service.holder.pools.enter
        with monkeypatch.context() as patched:
            patched.setattr(HeldCalls, "open", False)
            patched.setattr(pool, "run_call", raising(TinkerError("no thread for this call")))
            with pytest.raises(TinkerError, match="no thread"):
                trainer.optim_step(types.AdamParams())
        trainer.save_state("a").result(120)
        assert arrived(stub) == ["1 save"]


def test_a_client_for_whose_creation_no_thread_starts_fails_with_this_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with world() as (stub, trainer):
        service = trainer.service
        release = stub.hold("/save_weights_for_sampler")
        sampler = trainer.save_weights_and_get_sampling_client()
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=2)
        held = sampler.sample(prompt, 1, params)
        with monkeypatch.context() as patched:
            patched.setattr(
                service.holder.pools.create, "run", raising(RuntimeError("can't start new thread"))
            )
            with pytest.raises(TinkerError, match="no thread for this call"):
                service.create_sampling_client(base_model="stub/model")
            stub.await_asked("/save_weights_for_sampler")
            release.set()
            for call in (sampler, held):
                assert "no thread for this call: can't start new thread" in str(call.exception(120))
        later = trainer.save_weights_and_get_sampling_client()
        assert later.sample(prompt, 1, params).result(120).sequences
