"""Prices of a million tokens, from a file the user can edit. A missing price is unknown, not zero.

The file is JSON, at `~/.tinker/prices.json` or the path in `TINKER_PRICES`:

    {"models": {"meta-llama/Llama-3.1-8B": {"trained": 0.4, "prompt": 0.13, "cached": 0.03, "sampled": 0.4},
                "Qwen/*": {"trained": 1.1}}}

Prices are US dollars per million tokens. A name may end with a star; the longest match counts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from tinker_sync.errors import ConfigurationError
from tinker_sync.usage.counts import KINDS, Kind, TokenCounts

PER_TOKENS: Final = 1_000_000
# The built-in models run on the user's own machine.
_BUILT_IN: Final = {"tinker-sync/*": dict.fromkeys(KINDS, 0.0)}


@frozen(kw_only=True)
class Price:
    """Dollars for a million tokens of each kind. None means unknown.

    >>> Price(trained=2.0).of(TokenCounts(trained=500_000))
    1.0
    >>> Price(trained=2.0).of(TokenCounts(trained=1, sampled=1)) is None
    True
    """

    trained: float | None = None
    prompt: float | None = None
    cached: float | None = None
    sampled: float | None = None

    def of(self, counts: TokenCounts) -> float | None:
        """Return the cost of token counts, or None when one of the prices is unknown."""
        cost_usd = 0.0
        for kind, count in counts.items():
            rate = getattr(self, kind)
            if rate is None:
                return None
            cost_usd += rate * count / PER_TOKENS
        return cost_usd

    def missing(self, counts: TokenCounts) -> tuple[Kind, ...]:
        """Return the kinds in `counts` without a price.

        >>> Price(trained=2.0).missing(TokenCounts(trained=1, sampled=1))
        ('sampled',)
        """
        return tuple(kind for kind, _ in counts.items() if getattr(self, kind) is None)


@frozen
class PriceTable:
    """Prices by the name of the base model.

    >>> table = PriceTable.of({"Qwen/*": {"trained": 1.0}, "Qwen/Qwen3-8B": {"trained": 0.5}})
    >>> table.price("Qwen/Qwen3-8B").trained, table.price("Qwen/Qwen3-32B").trained
    (0.5, 1.0)
    >>> table.price("someone/else")
    Price(trained=None, prompt=None, cached=None, sampled=None)
    """

    prices: Mapping[str, Price] = field(factory=dict)
    path: Path | None = None
    """The file of the table, where a user adds missing prices."""

    @classmethod
    def of(cls, models: Mapping[str, Mapping[str, float]], path: Path | None = None) -> PriceTable:
        """Make a table of the given and the built-in prices.

        Raises:
            ConfigurationError: an entry is invalid; the text names it.
        """
        where = f"the price table {path}" if path else "the price table"
        merged = {**_BUILT_IN, **models}
        return cls({name: _read_price(where, name, rates) for name, rates in merged.items()}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> PriceTable:
        """Load a table from a file: `path`, else `TINKER_PRICES`, else `~/.tinker/prices.json` if it exists.

        Raises:
            ConfigurationError: the file cannot be read, or is not a price table.
        """
        named = path or os.environ.get("TINKER_PRICES")
        place = Path(named) if named else Path(os.path.expanduser("~")) / ".tinker" / "prices.json"
        try:
            tree = json.loads(place.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if named:
                raise ConfigurationError(f"the price table {place} does not exist") from None
            return cls.of({}, place)
        except OSError as error:
            raise ConfigurationError(f"the price table {place} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"the price table {place} is not JSON: {error}") from error
        models = tree.get("models") if isinstance(tree, dict) else None
        if not isinstance(models, dict):
            raise ConfigurationError(f'the price table {place} has no object "models"')
        return cls.of(models, place)

    def price(self, base_model: str | None) -> Price:
        """Return the price under this name, else under the longest starred name that fits, else `Price()`."""
        if base_model is None:
            return Price()
        exact = self.prices.get(base_model)
        if exact is not None:
            return exact
        fitting = [
            name
            for name in self.prices
            if name.endswith("*") and base_model.startswith(name.removesuffix("*"))
        ]
        return self.prices[max(fitting, key=len)] if fitting else Price()


def _read_price(where: str, name: str, rates: Any) -> Price:
    if not isinstance(rates, Mapping):
        raise ConfigurationError(f"{where}: models[{name!r}] is not an object")
    unknown = [kind for kind in rates if kind not in KINDS]
    if unknown:
        raise ConfigurationError(f"{where}: models[{name!r}] has {unknown[0]!r}; expected {', '.join(KINDS)}")
    for kind, rate in rates.items():
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if rate is not None and not (number and math.isfinite(rate) and rate >= 0):
            raise ConfigurationError(f"{where}: models[{name!r}].{kind} is not a price: {rate!r}")
    return Price(**{kind: None if rate is None else float(rate) for kind, rate in rates.items()})
