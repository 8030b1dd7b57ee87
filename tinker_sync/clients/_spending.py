"""The tokens that a service client uses: counts, budgets, and the comparison with the bill."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final

from tinker_sync import types
from tinker_sync.clients import _deadlines
from tinker_sync.errors import TinkerError
from tinker_sync.usage.meter import Meter

if TYPE_CHECKING:
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.usage import Budget, PriceTable, Reconciliation, Usage

_HOUR: Final = timedelta(hours=1)
# The longest time that one bill may cover.
_WINDOW: Final = timedelta(days=14)


class Spending:
    """A counter of the tokens that one core uses. Thread-safe."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtime = runtime
        self._meter = Meter(_name_asker(runtime), clock=runtime.clock)
        runtime.lifecycle.add_observer(self._meter)

    def usage(self, prices: PriceTable | None) -> Usage:
        """Return the tokens used so far, by model, with their prices."""
        from tinker_sync.usage import PriceTable, Usage

        table = PriceTable.load() if prices is None else prices
        return Usage.of(self._meter.by_model(), table, self._runtime.server.known_session_id)

    def budget(self, usd: float | None, tokens: int | None, prices: PriceTable | None) -> Budget:
        """Return a limit, which is not in force until the user enters it with `with`."""
        from tinker_sync.usage import Budget, PriceTable

        return Budget(
            usd=usd,
            tokens=tokens,
            prices=prices if prices is not None or usd is None else PriceTable.load(),
            base_model=self._meter.base_model,
            attach=self._runtime.spending.attach,
        )

    def reconcile(self) -> Reconciliation:
        """Compare the counted usage with the bill."""
        from tinker_sync.clients.rest import AdminClient
        from tinker_sync.usage.report import reconcile

        span = self._meter.span
        counted = self._meter.by_model()
        admin = AdminClient(self._runtime)
        asked = (
            []
            if span is None
            else [admin.get_billing_usage(*each) for each in windows(span.first_s, span.last_s)]
        )
        return reconcile(counted, [bill.result() for bill in asked], self._runtime.server.known_session_id)


def windows(first_s: float, last_s: float) -> Iterator[tuple[datetime, datetime]]:
    """Yield the begin and the end of windows that together cover a span of time.

    No window is longer than one bill may cover. Windows begin and end at whole hours. An hour is added on
    both sides of the span, because the clocks of client and server differ.

    >>> [(begin.hour, end.hour) for begin, end in windows(3 * 3600 + 5, 4 * 3600 + 5)]
    [(2, 6)]
    """
    begin = _hour(first_s) - _HOUR
    end = _hour(last_s) + 2 * _HOUR
    while begin < end:
        stop = min(begin + _WINDOW, end)
        yield begin, stop
        begin = stop


def _hour(moment_s: float) -> datetime:
    moment = datetime.fromtimestamp(moment_s, tz=timezone.utc)
    return moment.replace(minute=0, second=0, microsecond=0)


def _name_asker(runtime: ClientRuntime) -> Callable[[str], str | None]:
    # The core holds the meter and so this function; a strong reference to the core would keep it alive.
    held = weakref.ref(runtime)

    def ask(model: str) -> str | None:
        alive = held()
        if alive is None or alive.closed:
            return None
        asks = [_of_run, _of_sampler] if ":train:" in model else [_of_sampler, _of_run]
        for each in asks:
            try:
                return each(alive, model)
            except TinkerError:
                continue
        return None

    return ask


def _of_run(runtime: ClientRuntime, model: str) -> str | None:
    info = runtime.server.call("get_info", types.GetInfoRequest(model_id=model), usual_s=_deadlines.REST_S)
    name: str | None = info.model_data.model_name
    return name


def _of_sampler(runtime: ClientRuntime, model: str) -> str | None:
    name: str | None = runtime.server.call(
        "get_sampler", path={"sampler": model}, usual_s=_deadlines.REST_S
    ).base_model
    return name
