"""Usage so far, and its comparison with the bill. Pure values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from attrs import frozen

from tinker_sync._base.displays import repr_html, to_pandas
from tinker_sync.insight.meter import KINDS, Kind, TokenCounts
from tinker_sync.insight.prices import PriceTable
from tinker_sync.types.billing import (
    BillingUsageEvent,
    BillingUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    TrainingBillingEvent,
)


@frozen(kw_only=True)
class UsageRow:
    """The usage of one base model.

    Attributes:
        base_model: its name, or None if unknown.
        cost_usd: None when a price is unknown.
        unpriced: the kinds of tokens without a price.
    """

    base_model: str | None
    tokens: TokenCounts
    cost_usd: float | None
    unpriced: tuple[Kind, ...] = ()


@frozen(kw_only=True)
class Usage:
    """The usage of a client so far, by model. Immutable; call `usage()` again for newer counts.

    >>> table = PriceTable.of({"org/base": {"trained": 2.0}})
    >>> print(Usage.of({"org/base": TokenCounts(trained=1_000_000), None: TokenCounts(sampled=5)}, table))
    org/base: 1,000,000 trained, $2.0000
    unknown model: 5 sampled, price of sampled unknown
    in all: 1,000,005 tokens, at least $2.0000
    """

    rows: tuple[UsageRow, ...]
    session_id: str | None = None

    _repr_html_ = repr_html
    to_pandas = to_pandas

    @classmethod
    def of(
        cls, counts: Mapping[str | None, TokenCounts], prices: PriceTable, session_id: str | None = None
    ) -> Usage:
        """Make the usage from token counts by base model. The key None stands for unknown models."""
        rows = []
        for base_model, own in sorted(counts.items(), key=lambda item: (item[0] is None, item[0] or "")):
            price = prices.price(base_model)
            row = UsageRow(
                base_model=base_model, tokens=own, cost_usd=price.of(own), unpriced=price.missing(own)
            )
            rows.append(row)
        return cls(rows=tuple(rows), session_id=session_id)

    @property
    def tokens(self) -> TokenCounts:
        """The tokens of all models."""
        return sum((row.tokens for row in self.rows), TokenCounts())

    @property
    def cost_usd(self) -> float | None:
        """The cost of all models in dollars, or None when a price is unknown."""
        costs = [row.cost_usd for row in self.rows]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    @property
    def known_cost_usd(self) -> float:
        """The cost in dollars of the models with known prices."""
        return sum(row.cost_usd for row in self.rows if row.cost_usd is not None)

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in row.tokens.items()) or "nothing"
            unknown = f"price of {' and '.join(row.unpriced)} unknown"
            cost = unknown if row.cost_usd is None else f"${row.cost_usd:.4f}"
            lines.append(f"{row.base_model or 'unknown model'}: {kinds}, {cost}")
        some = "" if self.cost_usd is not None else "at least "
        lines.append(f"in all: {self.tokens.total:,} tokens, {some}${self.known_cost_usd:.4f}")
        return "\n".join(lines)


@frozen(kw_only=True)
class Difference:
    """Tokens of one kind and model whose counted and billed numbers differ."""

    base_model: str | None
    kind: Kind
    counted: int
    billed: int


@frozen(kw_only=True)
class Reconciliation:
    """The counted tokens, the billed tokens, and their differences.

    A bill lags by up to some hours. It also includes results that the client never received, such as those
    of an interrupted script.
    """

    session_id: str | None
    counted: TokenCounts
    billed: TokenCounts
    differences: tuple[Difference, ...]
    billed_usd: float | None
    """The service's estimate of the cost; None when a part has no estimate."""
    cost_data_through: datetime | None = None

    @property
    def agrees(self) -> bool:
        """True when counted and billed tokens are equal."""
        return not self.differences

    def __str__(self) -> str:
        if self.agrees:
            return f"{self.counted.total:,} tokens were counted and billed"
        lines = [
            f"{each.base_model or 'unknown model'}: "
            f"{each.counted:,} {each.kind} counted, {each.billed:,} billed"
            for each in self.differences
        ]
        return "\n".join(lines)


def reconcile(
    counted: Mapping[str | None, TokenCounts], bills: Iterable[BillingUsageResponse], session_id: str | None
) -> Reconciliation:
    """Compare the counted tokens of a session with its part of the bill.

    Args:
        counted: token counts by base model.
        bills: the responses that together cover the session.
        session_id: the id of the session; None compares with the whole bills.

    >>> event = {
    ...     "bucket_start": "2026-01-30T00:00:00Z",
    ...     "bucket_end": "2026-01-30T01:00:00Z",
    ...     "base_model": "org/base",
    ...     "session_id": "s-1",
    ...     "event_info": {"type": "training", "token_count": 6},
    ... }
    >>> print(reconcile({"org/base": TokenCounts(trained=7)}, [BillingUsageResponse(data=[event])], "s-1"))
    org/base: 7 trained counted, 6 billed
    """
    billed: dict[str | None, TokenCounts] = {}
    costs: list[float | None] = []
    through: list[datetime] = []
    for bill in bills:
        through += [bill.cost_data_through] if bill.cost_data_through else []
        for event in bill.data:
            tokens = _count_tokens(event)
            if tokens is None or (session_id is not None and event.session_id != session_id):
                continue
            billed[event.base_model] = billed.get(event.base_model, TokenCounts()) + tokens
            costs.append(event.estimated_cost_usd)
    return Reconciliation(
        session_id=session_id,
        counted=sum(counted.values(), TokenCounts()),
        billed=sum(billed.values(), TokenCounts()),
        differences=tuple(_find_differences(counted, billed)),
        billed_usd=None if None in costs else sum(cost for cost in costs if cost is not None),
        cost_data_through=max(through, default=None),
    )


def _count_tokens(event: BillingUsageEvent) -> TokenCounts | None:
    info = event.event_info
    if isinstance(info, TrainingBillingEvent):
        return TokenCounts(trained=info.token_count)
    if isinstance(info, SamplingPrefillBillingEvent):
        return TokenCounts(**{"cached" if info.cached else "prompt": info.token_count})
    if isinstance(info, SamplingSampleBillingEvent):
        return TokenCounts(sampled=info.token_count)
    return None


def _find_differences(
    counted: Mapping[str | None, TokenCounts], billed: Mapping[str | None, TokenCounts]
) -> Iterable[Difference]:
    for model in sorted({*counted, *billed}, key=lambda name: (name is None, name or "")):
        here, there = counted.get(model, TokenCounts()), billed.get(model, TokenCounts())
        for kind in KINDS:
            if getattr(here, kind) != getattr(there, kind):
                yield Difference(
                    base_model=model, kind=kind, counted=getattr(here, kind), billed=getattr(there, kind)
                )
