"""Estimates of the usage of planned work. Pure, except for reading the price file."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from tinker_sync.runtime.admission import length_of
from tinker_sync.types.datum import Datum
from tinker_sync.types.model_input import ModelInput
from tinker_sync.types.sampling import SamplingParams
from tinker_sync.usage.counts import Kind, TokenCounts
from tinker_sync.usage.prices import PriceTable


@frozen(kw_only=True)
class Estimate:
    """An upper bound on the usage of some work.

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

    >>> datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    >>> table = PriceTable.of({"org/base": {"trained": 2.0}})
    >>> print(estimate([datum] * 1000, "org/base", epochs=2, prices=table))
    6,000 tokens (6,000 trained), $0.0120
    """
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

    >>> prompts = [ModelInput.from_ints([1, 2])] * 10
    >>> estimate_samples(prompts, SamplingParams(max_tokens=5), num_samples=4, prices=PriceTable()).tokens
    TokenCounts(trained=0, prompt=20, cached=0, sampled=200)
    """
    lengths = [length_of(prompt) for prompt in prompts]
    sampled = len(lengths) * num_samples * (sampling_params.max_tokens or 0)
    return price_tokens(TokenCounts(prompt=sum(lengths), sampled=sampled), base_model, prices)


def price_tokens(counts: TokenCounts, base_model: str | None, prices: PriceTable | None) -> Estimate:
    """Return token counts with their cost.

    >>> price_tokens(TokenCounts(sampled=1), None, PriceTable()).unpriced
    ('sampled',)
    """
    price = (PriceTable.load() if prices is None else prices).price(base_model)
    return Estimate(tokens=counts, cost_usd=price.of(counts), unpriced=price.missing(counts))
