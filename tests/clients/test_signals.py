"""Signal handlers and Ctrl-C at any moment of a call: nothing hangs, and every future ends.

`support.signals` finds the moments. A handler runs on top of the call that it interrupts, on the same thread,
so it must not need a lock that this thread holds, nor wait for another thread that needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from support.signals import at_every_moment
from support.tinker_stub import Stub, StubServer

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient

PATIENCE_S = 60.0
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)


class World:
    """Clients of one service that are ready."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.service = ServiceClient(base_url=stub.url, api_key="tml-x")  # type: ignore[attr-defined]
        self.sampler = self.service.create_sampling_client(base_model="stub/model").result(PATIENCE_S)
        self.trainer = self.service.create_lora_training_client("stub/model").result(PATIENCE_S)


Call = Callable[[World], Future[Any]]

CALLS: dict[str, Call] = {
    "sample": lambda world: world.sampler.sample(PROMPT, 1, PARAMS),
}


@pytest.fixture
def world() -> Iterator[World]:
    with StubServer() as stub:
        made = World(stub)
        with made.service:
            yield made


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_handler_may_make_the_same_call_at_any_moment(world: World, name: str) -> None:
    """As in a script that a batch system ends: the handler of SIGTERM saves, and waits for the save."""
    call = CALLS[name]

    def check(future: Future[Any], moment: str) -> None:
        assert future.exception(PATIENCE_S) is None, moment

    moments = at_every_moment(lambda: call(world), lambda: call(world).result(PATIENCE_S), check)
    assert moments > 100
