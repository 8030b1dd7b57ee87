"""Clients of one process share their parts: one close ends all, and a forked child has its own."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref

import pytest
from support.crowd import together, until
from support.isolation import our_threads
from support.tinker_stub import Answer, Stub

from tinker_sync import types
from tinker_sync.clients._base import SharedRuntimes
from tinker_sync.clients.rest import RestClient
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.config import Settings
from tinker_sync.errors import ClientClosedError
from tinker_sync.runtime.client_runtime import ClientRuntime

PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)


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
