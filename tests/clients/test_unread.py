"""A failed call whose result the user never reads is logged once, with its name and the user's line."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.crowd import until
from support.raising import raising, refuse_threads
from support.scripts import Script
from support.tinker_stub import Answer, Stub

from tinker_sync import as_completed, types
from tinker_sync._base.clock import Wake
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import ExperimentalWarning, RequestFailedError
from tinker_sync.lib.names import AwaitableConcurrentFuture
from tinker_sync.runtime.futures import APIFuture

PATIENCE_S = 120.0
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})
STEP = types.AdamParams()
FAILED = Answer(body={"error": "no room", "category": "server"})


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "tinker_sync")

    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if "never looked at" in record.getMessage()]

    return messages


def end(stub: Stub, call: Callable[[], APIFuture[Any]]) -> APIFuture[Any]:
    """Make a call that fails. When its future is done, return the future; its result is not read."""
    stub.script("/retrieve_future", FAILED)
    future = call()
    until(future.done)
    return future


def calls(service: ServiceClient) -> dict[str, Callable[[], APIFuture[Any]]]:
    trainer = service.create_lora_training_client("stub/model").result()
    sampler = service.create_sampling_client(base_model="stub/model").result()
    return {
        "sample": lambda: sampler.sample(PROMPT, 1, PARAMS),
        "compute_logprobs": lambda: sampler.compute_logprobs(PROMPT),
        "forward_backward": lambda: trainer.forward_backward([DATUM], "cross_entropy"),
        "save_state": lambda: trainer.save_state("a"),
    }


def test_an_unread_failure_is_logged_when_its_future_is_collected(
    stub: Stub, service: ServiceClient, logged: Callable[[], list[str]]
) -> None:
    gc.collect()  # logs the unread futures of other tests now
    for name, call in calls(service).items():
        before = len(logged())
        future = end(stub, call)
        assert len(logged()) == before
        del future
        gc.collect()
        until(lambda: len(logged()) > before)  # noqa: B023  # called here and now
        (message,) = logged()[before:]
        assert message.startswith(f"{name} at test_unread.py:")
        assert message.endswith("no room (request " + message.rpartition("(request ")[2])


def test_as_completed_is_no_look_at_the_failures_of_its_futures(
    stub: Stub, service: ServiceClient, logged: Callable[[], list[str]]
) -> None:
    gc.collect()
    failed = [end(stub, calls(service)["sample"])]
    assert len(list(as_completed(failed))) == 1
    del failed
    until(lambda: gc.collect() >= 0 and len(logged()) == 1)


def test_unread_failures_of_transfers_and_of_calls_for_many_checkpoints_are_logged(
    stub: Stub,
    service: ServiceClient,
    logged: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_threads(monkeypatch, "tinker-bulk")
    path = "tinker://run/weights/a"
    stub.script("/training_runs/run/checkpoints/weights/a/archive", Answer(404, {"detail": "none"}))
    rest = service.create_rest_client()
    lora = types.LoraConfig(rank=4)
    with pytest.warns(ExperimentalWarning):
        uploaded = rest.upload_external_weights(tmp_path, "stub/model", lora)
    futures = [
        rest.download_checkpoint(path, tmp_path / "a"),
        uploaded,
        rest.delete_checkpoints([path]),
    ]
    wait(futures, PATIENCE_S)
    del futures, uploaded
    gc.collect()
    until(lambda: len(logged()) == 3)
    assert sorted(message.partition(" at test_unread.py:")[0] for message in logged()) == [
        *("delete_checkpoints", "download_checkpoint", "upload_external_weights")
    ]


async def _awaited(future: APIFuture[Any]) -> None:
    await future


@pytest.mark.parametrize(
    "look",
    [
        lambda future: future.result(PATIENCE_S),
        lambda future: future.exception(PATIENCE_S),
        lambda future: future.add_done_callback(lambda _: None),
        lambda future: asyncio.run(_awaited(future)),
        lambda future: AwaitableConcurrentFuture(future).result(PATIENCE_S),
    ],
    ids=["result", "exception", "callback", "await", "wrapper"],
)
def test_a_failure_that_was_looked_at_is_not_logged(
    stub: Stub, service: ServiceClient, logged: Callable[[], list[str]], look: Callable[[Any], Any]
) -> None:
    trainer = service.create_lora_training_client("stub/model").result()
    future = end(stub, lambda: trainer.save_state("a"))
    with suppress(RequestFailedError):
        look(future)
    del future
    gc.collect()
    assert logged() == []


def _time_out(future: APIFuture[Any]) -> None:
    with pytest.raises(TimeoutError):
        future.result(timeout=0)


def _time_out_awaited(future: APIFuture[Any]) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(future.result_async(timeout=0))


def _cancel_await(future: APIFuture[Any]) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(_awaited(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def _interrupt(future: APIFuture[Any]) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Wake, "wait", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            future.result()


@pytest.mark.parametrize("leave", [_time_out, _time_out_awaited, _cancel_await, _interrupt])
def test_a_failure_after_a_wait_that_ended_early_is_logged(
    stub: Stub,
    service: ServiceClient,
    logged: Callable[[], list[str]],
    leave: Callable[[APIFuture[Any]], None],
) -> None:
    trainer = service.create_lora_training_client("stub/model").result()
    release = stub.hold("/save_weights")
    future = trainer.save_state("a")
    stub.await_asked("/save_weights")
    leave(future)
    stub.script("/retrieve_future", FAILED)
    release.set()
    wait([future], PATIENCE_S)
    del future
    gc.collect()
    until(lambda: len(logged()) == 1)


def test_a_failure_that_one_of_two_waits_has_seen_is_not_logged(
    stub: Stub, service: ServiceClient, logged: Callable[[], list[str]]
) -> None:
    trainer = service.create_lora_training_client("stub/model").result()
    release = stub.hold("/save_weights")

    def wait_twice() -> BaseException | None:
        future = trainer.save_state("a")
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(future.exception, PATIENCE_S)
            until(lambda: future._looked_at)
            _time_out(future)
            stub.script("/retrieve_future", FAILED)
            release.set()
            return seen.result(PATIENCE_S)

    assert isinstance(wait_twice(), RequestFailedError)
    gc.collect()
    assert logged() == []


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_failed_pass_is_logged_when_a_step_follows_it(
    stub: Stub, service: ServiceClient, logged: Callable[[], list[str]], pipelined: bool
) -> None:
    trainer = service.create_lora_training_client("stub/model").result()
    stub.script("/forward_backward", Answer(422, {"detail": "no such loss"}))
    passed = trainer.forward_backward([DATUM], "wrong")
    if not pipelined:
        until(passed.done)
        assert logged() == []
    trainer.optim_step(STEP).result(PATIENCE_S)
    until(lambda: len(logged()) == 1)
    assert "forward_backward at test_unread.py:" in logged()[0]
    trainer.optim_step(STEP).result(PATIENCE_S)
    del passed
    gc.collect()
    assert len(logged()) == 1


def test_unread_failures_are_logged_at_the_end_of_the_process(stub: Stub) -> None:
    text = """
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
trainer = service.create_lora_training_client("stub/model").result()
hear()
futures = [trainer.save_state("a"), trainer.save_state("b")]
while not all(future.done() for future in futures):
    threading.Event().wait(0.01)
futures[1].exception()
"""
    with Script(text, URL=stub.url) as script:  # type: ignore[attr-defined]
        stub.await_asked("/retrieve_future")
        stub.script("/retrieve_future", FAILED, FAILED)
        script.say("go on")
        ended = script.wait()
    assert ended.err.count("never looked at") == 1
    assert "save_state at <string>:" in ended.err
