"""`Budget`: a limit on the tokens or dollars of a `with` block, checked before each call is sent.

A result counts with the tokens that it used. A pending call counts with the most tokens that it can use:
those of its data or prompt, and `max_tokens` for each sample. So samples that are submitted at once stay
within the budget. The length of a sample without `max_tokens`, which is not known before, counts when the
result arrives. An image without `expected_tokens` counts as 0 tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from tinker_sync._base import fork as _fork
from tinker_sync._base.events import CostEstimate, TokensUsed
from tinker_sync.errors import BudgetExceededError, ConfigurationError, InvalidInputError
from tinker_sync.insight.meter import TokenCounts
from tinker_sync.insight.prices import PriceTable

if TYPE_CHECKING:
    from typing_extensions import Self


@frozen
class _Amount:
    """Tokens and dollars. A budget that limits only tokens has 0 dollars."""

    tokens: int = 0
    usd: float = 0.0

    def plus(self, other: _Amount, sign: int = 1) -> _Amount:
        return _Amount(self.tokens + sign * other.tokens, self.usd + sign * other.usd)


class Budget:
    """A limit on what the calls of a service client use in a `with` block. Thread-safe.

    `ServiceClient.budget` creates it. In nested blocks, every budget must allow a call.

    >>> budget = Budget(tokens=10)
    >>> held = budget.hold(CostEstimate(model="s:train:0", trained=8))
    >>> budget.hold(CostEstimate(model="s:train:0", trained=8))
    Traceback (most recent call last):
        ...
    tinker_sync.errors.BudgetExceededError: this call could take up to 8 tokens, but of 10 ...

    Args:
        usd: the most dollars; None: no limit.
        tokens: the most tokens of all kinds together; None: no limit.
        prices: the price table; None: a table without prices.
        base_model: returns the base model of a model or sampler.
        attach: connects the budget to a client; returns the function that disconnects it.

    Raises:
        InvalidInputError: no limit is given, or a limit is not a number from 0 on.
    """

    def __init__(
        self,
        *,
        usd: float | None = None,
        tokens: int | None = None,
        prices: PriceTable | None = None,
        base_model: Callable[[str], str | None] = lambda _: None,
        attach: Callable[[Budget], Callable[[], object]] | None = None,
    ) -> None:
        if usd is None and tokens is None:
            raise InvalidInputError("budget: give usd, tokens or both")
        limit: Any
        for name, limit in (("usd", usd), ("tokens", tokens)):
            if limit is not None and not (isinstance(limit, Real) and float(limit) >= 0):
                raise InvalidInputError(f"budget: {name} must be a number, 0 or more, got {limit!r}")
        self.usd = usd
        self.tokens = tokens
        self._prices = prices or PriceTable()
        self._base_model = base_model
        self._attach = attach
        # One for each block that has been entered, also in several threads.
        self._detaches: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._spent = _Amount()  # guarded by _lock
        self._held: dict[object, _Amount] = {}  # guarded by _lock
        self._outstanding = _Amount()  # guarded by _lock; the sum of _held
        _fork.renew_in_child(self)

    def __enter__(self) -> Self:
        if self._attach is not None:
            self._detaches.append(self._attach(self))
        return self

    def __exit__(self, *_: object) -> None:
        if self._attach is not None:
            self._detaches.pop()()

    @property
    def spent_tokens(self) -> int:
        """The tokens of the results that have arrived.

        >>> Budget(tokens=10).spent_tokens
        0
        """
        return self._spent.tokens

    @property
    def spent_usd(self) -> float:
        """The cost of the results that have arrived, in dollars; 0 in a budget that limits only tokens.

        >>> Budget(usd=1.0).spent_usd
        0.0
        """
        return self._spent.usd

    # -------------------------------------------------------------------------------------- for clients

    def hold(self, plan: CostEstimate) -> object:
        """Reserve the most tokens that a call can use, and return the key of the reservation.

        Raises:
            BudgetExceededError: the call could exceed the budget.
            ConfigurationError: the budget limits dollars and a price is unknown.
        """
        counts = TokenCounts(trained=plan.trained, prompt=plan.prompt, sampled=plan.sampled or 0)
        # Samples of unknown length count 0 tokens here, but their result will need the price.
        self._require_prices(plan.model, evolve(counts, sampled=1) if plan.sampled is None else counts)
        wanted = self._cost_of(plan.model, counts)
        with self._lock:
            spent, under_way = self._spent, self._outstanding
            refusal = self._find_refusal(wanted, spent, under_way)
            if refusal is None:
                key = object()
                self._held[key] = wanted
                self._outstanding = under_way.plus(wanted)
                return key
        raise refusal

    def settle(self, key: object, used: TokensUsed, *, last: bool) -> None:
        """Move the usage of a result from reserved to spent.

        Args:
            key: of the reservation.
            used: the tokens of the result.
            last: True for the last result of the call, which also drops the rest of the reservation.
        """
        counts = TokenCounts(
            trained=used.trained, prompt=used.prompt, cached=used.cached, sampled=used.sampled
        )
        amount = self._cost_of(used.model, counts)
        with self._lock:
            self._spent = self._spent.plus(amount)
            held = self._held.pop(key, None)
            if held is not None:
                left = _Amount() if last else held.plus(amount, -1)
                self._outstanding = self._outstanding.plus(held, -1).plus(left)
                if not last:
                    self._held[key] = left

    def release(self, key: object) -> None:
        """Drop what remains of a reservation. A second call has no effect."""
        with self._lock:
            held = self._held.pop(key, None)
            if held is not None:
                self._outstanding = self._outstanding.plus(held, -1)

    def renew_after_fork(self) -> None:
        """Drop the reservations, which belong to calls of the parent process."""
        self._lock = threading.Lock()
        self._held, self._outstanding = {}, _Amount()

    def _cost_of(self, model: str, counts: TokenCounts) -> _Amount:
        """Return tokens and, in a budget that limits dollars, the cost of those whose price is known.

        Cached tokens without a price cost as much as other prompt tokens.
        """
        if self.usd is None:
            return _Amount(counts.total)
        price = self._prices.price(self._base_model(model))
        if price.cached is None:  # the price of prompt tokens is an upper bound: a cache makes them cheaper
            price = evolve(price, cached=price.prompt)
        price = evolve(price, **dict.fromkeys(price.missing(counts), 0.0))
        return _Amount(counts.total, price.of(counts) or 0.0)

    def _require_prices(self, model: str, counts: TokenCounts) -> None:
        """Raise ConfigurationError if the budget limits dollars and a price for `counts` is unknown."""
        if self.usd is None:
            return
        base_model = self._base_model(model)
        missing = self._prices.price(base_model).missing(counts)
        if missing:
            where = f"; add it to {self._prices.path}" if self._prices.path else ""
            raise ConfigurationError(
                f"the price of {' and '.join(missing)} tokens of {base_model or model} is not known, "
                f"so dollars cannot be limited{where}, or limit tokens"
            )

    def _find_refusal(
        self, wanted: _Amount, spent: _Amount, under_way: _Amount
    ) -> BudgetExceededError | None:
        so_far = spent.plus(under_way)
        if self.tokens is not None and so_far.tokens + wanted.tokens > self.tokens:
            return BudgetExceededError(
                f"this call could take up to {wanted.tokens:,} tokens, but of {self.tokens:,} tokens "
                f"{spent.tokens:,} are spent and up to {under_way.tokens:,} are under way",
                limit=self.tokens,
                spent=spent.tokens,
                unit="tokens",
            )
        if self.usd is not None and so_far.usd + wanted.usd > self.usd * (1 + 1e-12):
            return BudgetExceededError(
                f"this call could cost up to ${wanted.usd:.4f}, but of ${self.usd} "
                f"${spent.usd:.4f} are spent and up to ${under_way.usd:.4f} are under way",
                limit=self.usd,
                spent=spent.usd,
                unit="usd",
            )
        return None
