"""Prices of a million tokens, from a file the user can edit, and estimates of planned work.

A missing price is unknown, not zero.

The file is JSON, at `~/.tinker/prices.json` or the path in `TINKER_PRICES`:

    {"models": {"meta-llama/Llama-3.1-8B": {"trained": 0.4, "prompt": 0.13, "cached": 0.03, "sampled": 0.4},
                "Qwen/*": {"trained": 1.1}}}

Prices are US dollars per million tokens. A name may end with a star. The full name of a model counts first,
then the longest match.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from tinker_sync.errors import ConfigurationError, InvalidInputError
from tinker_sync.insight.meter import KINDS, Kind, TokenCounts

if TYPE_CHECKING:
    from tinker_sync.types.datum import Datum
    from tinker_sync.types.model_input import ModelInput
    from tinker_sync.types.sampling import SamplingParams

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
        """Return the cost of token counts, or None if the price of a kind of token in them is unknown."""
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
    """The file of the table, where a user adds missing prices; None for a table without a file."""

    @classmethod
    def of(cls, models: Mapping[str, Mapping[str, float]], path: Path | None = None) -> PriceTable:
        """Make a table of the given prices, and of the price 0 for models of this package.

        `path` becomes the `path` of the table; errors name it.

        Raises:
            ConfigurationError: an entry is invalid; the text names it.
        """
        where = f"the price table {path}" if path else "the price table"
        merged = {**_BUILT_IN, **models}
        return cls({name: _read_price(where, name, rates) for name, rates in merged.items()}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> PriceTable:
        """Load a table from a file: `path`, else `TINKER_PRICES`, else `~/.tinker/prices.json` if it exists.

        Without a file, the table has only the models of this package.

        Raises:
            ConfigurationError: the file cannot be read or is not a price table; or a named file is missing.
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


def table_of(prices: PriceTable | None) -> PriceTable:
    """Return the table of an argument `prices`: the user's own if it is None.

    Raises:
        InvalidInputError: `prices` is no table.
        ConfigurationError: the user's table cannot be read.

    >>> table_of(PriceTable()) == PriceTable()
    True
    """
    if prices is not None and not isinstance(prices, PriceTable):
        raise InvalidInputError(
            f"prices: expected a PriceTable, got {type(prices).__name__}; PriceTable.of makes one of a dict"
        )
    return PriceTable.load() if prices is None else prices


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


@frozen(kw_only=True)
class Estimate:
    """The tokens that some work can use at most, and their cost.

    The bound does not hold for samples without `max_tokens` and images without `expected_tokens`: they count
    as 0 tokens, because their length is unknown.

    >>> print(Estimate(tokens=TokenCounts(trained=1_500_000), cost_usd=0.6))
    1,500,000 tokens (1,500,000 trained), $0.6000
    """

    tokens: TokenCounts
    cost_usd: float | None
    """None when a price is unknown; see `unpriced`."""
    unpriced: tuple[Kind, ...] = ()
    """The kinds of tokens whose price is unknown."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.tokens.items())
        cost = "price unknown" if self.cost_usd is None else f"${self.cost_usd:.4f}"
        return f"{self.tokens.total:,} tokens{f' ({kinds})' if kinds else ''}, {cost}"


def estimate(
    data: Iterable[Datum], base_model: str | None = None, *, epochs: int = 1, prices: PriceTable | None = None
) -> Estimate:
    """Estimate the usage of training passes over `data`.

    Args:
        data: the examples, each used once in an epoch.
        base_model: the trained model; without it the price is unknown.
        epochs: the number of passes.
        prices: the price table; None calls `PriceTable.load`.

    >>> from tinker_sync.types import Datum, ModelInput
    >>> datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    >>> table = PriceTable.of({"org/base": {"trained": 2.0}})
    >>> print(estimate([datum] * 1000, "org/base", epochs=2, prices=table))
    6,000 tokens (6,000 trained), $0.0120
    """
    from tinker_sync.types.model_input import length_of  # a table of prices alone needs no inputs of models

    trained = sum(length_of(datum.model_input) for datum in data) * epochs
    return price_tokens(TokenCounts(trained=trained), base_model, prices)


def estimate_samples(
    prompts: Iterable[ModelInput],
    sampling_params: SamplingParams,
    base_model: str | None = None,
    *,
    num_samples: int = 1,
    prices: PriceTable | None = None,
) -> Estimate:
    """Estimate the most that sampling can use: samples of full length, and no prompt in the cache.

    Args:
        prompts: the prompts.
        sampling_params: `max_tokens` bounds each sample; without it this estimate omits the samples.
        base_model: the sampled model; without it the price is unknown.
        num_samples: the samples of each prompt.
        prices: the price table; None calls `PriceTable.load`.

    >>> from tinker_sync.types import ModelInput, SamplingParams
    >>> prompts = [ModelInput.from_ints([1, 2])] * 10
    >>> estimate_samples(prompts, SamplingParams(max_tokens=5), num_samples=4, prices=PriceTable()).tokens
    TokenCounts(trained=0, prompt=20, cached=0, sampled=200)
    """
    from tinker_sync.types.model_input import length_of

    lengths = [length_of(prompt) for prompt in prompts]
    sampled = len(lengths) * num_samples * (sampling_params.max_tokens or 0)
    return price_tokens(TokenCounts(prompt=sum(lengths), sampled=sampled), base_model, prices)


def price_tokens(counts: TokenCounts, base_model: str | None, prices: PriceTable | None) -> Estimate:
    """Return token counts with their cost. Without `prices`, load the user's table.

    >>> price_tokens(TokenCounts(sampled=1), None, PriceTable()).unpriced
    ('sampled',)
    """
    price = table_of(prices).price(base_model)
    return Estimate(tokens=counts, cost_usd=price.of(counts), unpriced=price.missing(counts))
