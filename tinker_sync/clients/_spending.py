"""The tokens that a service client uses: counts and budgets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinker_sync import types
from tinker_sync.clients import _deadlines
from tinker_sync.clients._shared import BaseClient
from tinker_sync.errors import TinkerError
from tinker_sync.insight.meter import Meter

if TYPE_CHECKING:
    from tinker_sync.insight import Budget, PriceTable, Usage
    from tinker_sync.runtime.client_runtime import ClientRuntime


class SpendingCalls(BaseClient):
    """The part of a service client that counts tokens and limits them."""

    _meter: Meter

    def usage(self, *, prices: PriceTable | None = None) -> Usage:
        """Return the tokens used so far, by model: trained, prompt, cached prompt and sampled.

        The client counts them from the results that have arrived. A price that is missing from the table is
        reported as unknown. If the client does not know the base model of a model, such as one from a
        checkpoint, it asks the server for the name, which blocks.

        Args:
            prices: the prices of tokens; None: those in the file that `TINKER_PRICES` names, else in
                `~/.tinker/prices.json`.

        Raises:
            ConfigurationError: the file of prices cannot be read.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     service.usage().tokens.trained
        2
        """
        from tinker_sync.insight import PriceTable, Usage

        table = PriceTable.load() if prices is None else prices
        return Usage.of(self._meter.by_model(), table, self._runtime.server.known_session_id)

    def budget(
        self, usd: float | None = None, tokens: int | None = None, *, prices: PriceTable | None = None
    ) -> Budget:
        """Return a limit for the tokens or dollars used in a ``with`` block.

        A call that could exceed the budget is not sent: it raises `BudgetExceededError`, or its future fails
        with this error if its client is not ready yet. Calls under way count with their highest possible use,
        samples with `max_tokens` each. The limit applies to all clients of this service client.

        Args:
            usd: the most dollars; a call whose price is unknown raises `ConfigurationError`.
            tokens: the most tokens of all kinds.
            prices: as for `usage`.

        Raises:
            InvalidInputError: no limit is given, or one is not a number from 0 on.
            ConfigurationError: the file of prices cannot be read.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2])
        ...     with service.budget(tokens=100):
        ...         try:
        ...             sampling.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=1000)).result()
        ...         except tinker_sync.BudgetExceededError as error:
        ...             print(type(error).__name__)
        BudgetExceededError
        """
        from tinker_sync.insight import Budget, PriceTable

        return Budget(
            usd=usd,
            tokens=tokens,
            prices=prices if prices is not None or usd is None else PriceTable.load(),
            base_model=self._meter.base_model,
            attach=self._runtime.spending.attach,
        )

    def _count(self) -> None:
        """Begin to count the tokens of the results that arrive."""
        self._meter = Meter(_name_asker(self._runtime))
        self._runtime.lifecycle.add_observer(self._meter)


def _name_asker(runtime: ClientRuntime) -> Callable[[str], str | None]:
    # The runtime holds the meter and so this function; a strong reference to the runtime would keep it alive.
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
