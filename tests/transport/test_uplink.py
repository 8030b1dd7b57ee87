"""How large passes use the line: several at once, and compressed if that pays.

The server makes the speed of the line with the client's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.clock import PATIENCE_S
from support.hasty import trainer_of, world
from support.tinker_stub import Answer, Asked, Stub

from tinker_sync import types
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.uplink import LOOK_EVERY, Uplink
from tinker_sync.wire import zstd

needs_zstd = pytest.mark.skipif(not zstd.is_available(), reason="neither Python nor a package has zstd")
TOKENS = 40_000
FLAGS = {"proto_compress_fwdbwd": True, "fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": False}
FAST, SLOW = 1e12, 1e5  # in octets a second, far from what any compressor does


class Line(Stub):
    """A server behind a line: each request takes a second of the client's clock, and each octet more."""

    a_second = FAST
    clock: Any = None

    def on_forward_backward(self, asked: Asked) -> Any:
        self.clock.advance(1.0 + len(asked.body) / self.a_second)
        return super().on_forward_backward(asked)

    def on_optim_step(self, asked: Asked) -> Any:
        self.clock.advance(1.0)
        return super().on_optim_step(asked)

    def codings(self) -> list[str | None]:
        """Return how the bodies of the passes came so far."""
        return [asked.headers.get("content-encoding") for asked in self.asked("/forward_backward")]


def made_data(count: int) -> list[types.Datum]:
    tokens = np.arange(TOKENS, dtype="int32")
    return [types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": np.arange(TOKENS)})] * count


@contextmanager
def behind_a_line(a_second: float) -> Iterator[tuple[Any, Any]]:
    """Yield a server that takes so many octets in a second, and a training client."""
    with world(FLAGS, Line) as (line, service):
        line.a_second, line.clock = a_second, service.holder.clock
        yield line, trainer_of(service)


def run(trainer: Any, data: list[types.Datum]) -> None:
    """Run a pass after a step of the optimizer, which shows how long a round trip takes."""
    trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
    assert len(trainer.forward_backward(data, "cross_entropy").result(PATIENCE_S).loss_fn_outputs) == len(
        data
    )


@needs_zstd
def test_over_a_slow_line_all_bodies_are_compressed_and_fewer_octets_are_sent() -> None:
    with behind_a_line(SLOW) as (line, trainer):
        run(trainer, made_data(4))
        run(trainer, made_data(4))
    assert line.codings() == ["zstd"] * 8
    sent = sum(len(asked.body) for asked in line.asked("/forward_backward"))
    assert sent < 8 * TOKENS * 12 / 2


@needs_zstd
def test_a_fast_line_gets_bodies_as_they_are_once_it_is_known() -> None:
    with behind_a_line(FAST) as (line, trainer):
        run(trainer, made_data(6))
        run(trainer, made_data(6))
    assert line.codings() == ["zstd", *[None] * 11]


@needs_zstd
def test_now_and_then_a_body_is_compressed_because_the_line_may_have_become_slow() -> None:
    seconds = iter(range(1000))
    uplink, body = Uplink(cpu=lambda: float(next(seconds))), bytes(10**6)
    uplink.note(10**6, 0.0, 1e-6)
    compressed = [uplink.compressed(body) is not None for _ in range(2 * LOOK_EVERY)]
    assert [number + 1 for number, each in enumerate(compressed) if each] == [1, LOOK_EVERY, 2 * LOOK_EVERY]
    for second in range(100):
        uplink.note(10**6, 10.0 + second, 10.9 + second)
    assert uplink.compressed(body) is None  # it takes a second of CPU
    for second in range(100):
        uplink.note(10**6, 200.0 + 3 * second, 203.0 + 3 * second)
    assert uplink.compressed(body) is not None


@needs_zstd
def test_a_body_that_does_not_shrink_is_sent_as_it_is() -> None:
    noise = np.random.default_rng(1).bytes(10**6)
    uplink = Uplink()
    assert uplink.compressed(noise) is None
    assert uplink.compressed(PiecedBody([b"text", noise])) is None


def test_bodies_under_way_together_share_the_line() -> None:
    uplink = Uplink()
    for index in range(4):  # all of them take a second in all
        uplink.note(5_000_000, 10.0, 10.25 + 0.25 * index)
    assert "<Uplink 20.0 MB/s" in repr(uplink)


def test_the_round_trip_is_not_time_of_the_line() -> None:
    uplink = Uplink()
    uplink.note(500, 0.0, 0.4)
    uplink.note(1_000_000, 1.0, 1.5)
    assert "<Uplink 10.0 MB/s" in repr(uplink)


def test_a_line_that_has_become_slow_is_soon_known_as_such() -> None:
    uplink = Uplink()
    for second in range(100):
        uplink.note(5_000_000, second, second + 0.05)
    assert "<Uplink 100.0 MB/s" in repr(uplink)
    for second in range(100, 130):
        uplink.note(5_000_000, second, second + 1.0)
    assert float(repr(uplink).split()[1]) < 6.0


@needs_zstd
@pytest.mark.parametrize("status", [503, 500])
def test_each_try_sends_the_same_compressed_bytes(status: int) -> None:
    bodies: list[tuple[bytes, str | None]] = []

    def refuse(asked: Asked) -> Answer:
        bodies.append((bytes(asked.body), asked.headers.get("content-encoding")))
        return Answer(status, {})

    with behind_a_line(FAST) as (line, trainer):
        line.script("/forward_backward", refuse, refuse)
        run(trainer, made_data(1))
        (accepted,) = line.asked("/forward_backward")[2:]
        bodies.append((bytes(accepted.body), accepted.headers.get("content-encoding")))
    assert {coding for _, coding in bodies} == {"zstd"}
    assert len({body for body, _ in bodies}) == 1


class Slow(Stub):
    """A server that accepts passes only when it has seven of them, or after so many looks."""

    looks, most, under_way = 10**6, 0, 0

    async def on_forward_backward(self, asked: Asked) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(self.looks):
            if self.most >= 7:
                break
            await asyncio.sleep(0.001)
        self.under_way -= 1
        return super().on_forward_backward(asked)


def large_data(count: int) -> list[types.Datum]:
    """Return data of 4.8 MB each, with few tokens."""
    image = types.ImageChunk(data=bytes(4_800_000), format="png", expected_tokens=2)
    datum = types.Datum(types.ModelInput(chunks=[image]), {"target_tokens": [1, 2]})
    return [datum] * count


@pytest.mark.parametrize(("budget", "looks", "most"), [(50_000_000, 10**6, 7), (5_000_000, 50, 2)])
def test_chunks_are_sent_while_others_wait_to_be_accepted_up_to_the_budget_of_the_server(
    budget: int, looks: int, most: int
) -> None:
    flags = {"fwdbwd_max_chunk_len": 1, "fwdbwd_dispatch_bytes_semaphore_size": budget}
    with world(flags, Slow) as (stub, service):
        stub.looks = looks
        future = trainer_of(service).forward_backward(large_data(8), "cross_entropy")
        assert len(future.result(PATIENCE_S).loss_fn_outputs) == 8
        assert stub.most <= most
        machinery = service.holder.server.ready()
        assert (machinery.train_bytes.free, machinery.sending_bytes.free) == (budget, 15_000_000)
