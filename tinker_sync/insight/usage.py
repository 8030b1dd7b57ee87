"""Usage so far. Pure values."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from tinker_sync._base.displays import repr_html, to_pandas
from tinker_sync.insight.meter import Kind, TokenCounts
from tinker_sync.insight.prices import PriceTable


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
