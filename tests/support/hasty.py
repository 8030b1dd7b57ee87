"""Clients whose pauses take no time; the lengths of the pauses are recorded instead.

The whole client runs, threads and sockets included, against a stub server. Only its clock is a double: pauses
advance it, and heartbeats never come due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.clock import PATIENCE_S, FakeClock
from support.tinker_stub import PROTO, Asked, Behaviour, Stub, StubServer, _fields

from tinker_sync._base.clock import Clock, paced
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.runtime.rate_limiter import RateLimiter
from tinker_sync.runtime.session import Session

# No pause of a client is longer. A longer wait is one for another thread, and takes real time.
_LONGEST_PAUSE_S = 120.0
_LOOK_S = 0.005

FLAGS: dict[str, Any] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "sample_dispatch_bytes_semaphore_size": 10_485_760,
    "inflight_response_bytes_semaphore_size": 52_428_800,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 50_000_000,
    "billing_exception_max_pause_duration_sec": 3600,
    "sample_no_retries": False,
    "sample_enable_stuck_detection": True,
    "sample_max_concurrent_requests": 2000,
    "use_pyqwest_transport": True,
    "create_model_via_load_weights": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
"""All settings that a current server sends. Clients recognise a current server by them."""


class HastyClock(FakeClock):
    """A clock on which a pause of up to `_LONGEST_PAUSE_S` is over at once.

    A longer wait, and every wait of the closing thread, is a wait for another thread and takes real time. The
    next heartbeat never becomes due.
    """

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[float] = []
        """The pauses before repeated polls and submits."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        thread = threading.current_thread().name
        if thread.startswith("tinker-heartbeat"):
            return event.wait()
        if thread.startswith("tinker-close"):  # it waits for answers of the stub, which take real time
            return event.wait(PATIENCE_S)
        if event.wait(_LOOK_S if timeout_s <= _LONGEST_PAUSE_S else PATIENCE_S):
            return True
        return super().wait(event, timeout_s)


def paused(client: ServiceClient) -> list[float]:
    """Return the lengths of a client's pauses in seconds.

    Those of blocking calls and limiters come first, then those before repeated polls and submits. Each of the
    two groups is in order.
    """
    clock: Any = client.holder.clock
    return [*(wait_s for wait_s in clock.waits if wait_s <= _LONGEST_PAUSE_S), *clock.timers]


def _hasten(reactor: Any, clock: HastyClock) -> None:
    """Make the pauses of a reactor end at once, and record them. Timers of deadlines stay as they are."""
    after = reactor.after

    def at_once(pause_s: float, action: Callable[[], object]) -> Any:
        if pause_s:
            clock.timers.append(pause_s)
            clock.advance(pause_s)
        return after(0.0, action)

    def later(delay_s: float, action: Callable[[], object]) -> Any:
        pauses = getattr(action, "__name__", "") == "end_of_pause"
        return at_once(delay_s, action) if pauses else after(delay_s, action)

    reactor.pause, reactor.after = at_once, later


def hasty_service(
    stub: Stub, *, open_server: bool = False, start: bool = True, **options: Any
) -> ServiceClient:
    """Return a service client whose pauses take no time. `paused` returns their lengths.

    Args:
        stub: the server.
        open_server: treat the status of a poll as the outcome of the work, as open servers mean it.
        start: request the server's settings now. If False, `open_server` has no effect.
    """
    client = ServiceClient(**{"base_url": stub.url, "api_key": "tml-hasty", **options})  # type: ignore[attr-defined]
    clock = HastyClock()
    set_clock(client, clock, limiter=RateLimiter(clock=clock))
    _hasten(client.holder.reactor, clock)
    if start:
        client.holder.server.ready().polls.open_server = open_server
    return client


def set_clock(client: ServiceClient, clock: Clock, **parts: Any) -> None:
    """Give an unused client this clock, before it reads the clock of the machine."""
    settings = client.holder.settings
    client.close("success").result(PATIENCE_S)
    client._runtime = ClientRuntime(settings, session=Session(), clock=clock, **parts)


@contextmanager
def world(
    flags: dict[str, Any] | None = None, kind: type[Stub] = Stub, **behaviour: Any
) -> Iterator[tuple[Any, ServiceClient]]:
    """Yield a stub of the current service, and a client whose pauses take no time."""
    stub = kind(Behaviour(config={**FLAGS, **(flags or {})}, **behaviour))
    with StubServer(stub), hasty_service(stub) as client:
        yield stub, client


def trainer_of(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client("stub/model").result(PATIENCE_S)


def sampler_of(client: ServiceClient, **options: Any) -> SamplingClient:
    return client.create_sampling_client(base_model="stub/model", **options).result(PATIENCE_S)


def number_of(asked: Asked) -> int:
    """Return the sequence number of a training request, in either format."""
    if asked.headers["content-type"] == PROTO:
        return int(dict(_fields(asked.body))[2])
    return int(asked.json()["seq_id"])


def beat_now(client: ServiceClient) -> None:
    """Send a heartbeat on this thread."""
    heartbeat = client.holder.server.session._heartbeat
    assert heartbeat is not None
    heartbeat.step()


# ------------------------------------------------ Clients whose pauses before another try are short
def quick_service(pace: float = 0.01, **options: Any) -> ServiceClient:
    """Return a service client that multiplies its pauses by `pace`."""
    with paced(pace):
        return ServiceClient(**options)
