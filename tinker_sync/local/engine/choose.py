"""The choice of tokens from rows of logits: temperature, top-k, top-p, and log-probabilities.

Rows are independent. The caller passes a uniform random number for each row, and the draw inverts the row's
cumulative distribution at this number. So the token depends only on the row's logits, settings and number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tinker_sync.local.engine._arrays import Array

_STRIDE = 64
"""`invert_cdf` first searches the sums of this many cells, and then one such stride cell by cell."""

_NUCLEUS = 256
"""The number of likeliest tokens to sort first for top-p. More are sorted only if these do not reach it."""

_MASK = (1 << 64) - 1


class Draws:
    """The uniform numbers of one sample: a stream that depends on the seed and the sample's number only.

    >>> Draws(7, 0).next() == Draws(7, 0).next(), Draws(7, 0).next() == Draws(7, 1).next()
    (True, False)
    """

    def __init__(self, seed: int, number: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed & _MASK, number + 1])))
        self._ahead: list[float] = []

    def next(self) -> float:
        """Return the next number, at least 0 and below 1."""
        if not self._ahead:
            self._ahead = self._rng.random(64).tolist()[::-1]
        return self._ahead.pop()

    def block(self, *shape: int) -> Array:
        """Return the next numbers as an array of this shape."""
        return self._rng.random(shape)


class SamplingSettings(NamedTuple):
    """The settings for the choice of a token.

    Temperature 0 takes the likeliest token. `top_k` -1 and `top_p` 1 exclude no token.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    @property
    def filtered(self) -> bool:
        """True if the settings may exclude some tokens."""
        return self.top_k > 0 or self.top_p < 1


class Chosen(NamedTuple):
    """The result of `choose`: for each row a token and its log-probability at temperature 1.

    A logit that `choose` has shifted, minus its row's value in `totals`, is a log-probability.
    """

    tokens: Array
    logprobs: Array
    totals: Array


def choose(logits: Array, settings: list[SamplingSettings], uniforms: list[float]) -> Chosen:
    """Choose a token for each row of `logits`, with its settings and its random number in `uniforms`.

    The logits are shifted in place, so that the largest of a row is 0.

    >>> greedy = SamplingSettings(temperature=0)
    >>> choose(np.array([[0.0, 9.0], [9.0, 0.0]]), [greedy] * 2, [0.5, 0.5]).tokens.tolist()
    [1, 0]
    """
    logits -= logits.max(axis=1, keepdims=True)
    weights = np.exp(logits)
    totals = np.log(weights.sum(axis=1))
    tokens = np.empty(len(logits), dtype=np.int64)
    plain: list[int] = []
    for row, how in enumerate(settings):
        if how.temperature == 0:
            tokens[row] = logits[row].argmax()
        elif how.filtered:
            tokens[row] = _draw_filtered(_scale(logits[row], how.temperature), how, uniforms[row])
        else:
            plain.append(row)
            if how.temperature != 1:
                np.exp(_scale(logits[row], how.temperature), out=weights[row])
    if len(plain) == len(tokens):
        tokens = invert_cdf(weights, np.array(uniforms))
    elif plain:
        tokens[plain] = invert_cdf(weights[plain], np.array(uniforms)[plain])
    logprobs = logits[np.arange(len(tokens)), tokens] - totals
    return Chosen(tokens, logprobs, totals)


def _scale(shifted: Array, temperature: float) -> Array:
    with np.errstate(over="ignore"):  # near temperature 0, all but the best logits become minus infinity
        hot: Array = shifted / shifted.dtype.type(max(temperature, 1e-30))
    return hot


def invert_cdf(weights: Array, uniforms: Array) -> Array:
    """Return the index of a cell for each row of unnormalized probabilities.

    It is the first cell at which the running sum exceeds the row's number in `uniforms` times the row's sum.

    >>> invert_cdf(np.array([[1.0, 2.0, 1.0]] * 3), np.array([0.2, 0.5, 0.8])).tolist()
    [0, 1, 2]
    """
    rows, cells = weights.shape
    whole = cells // _STRIDE
    sums = np.empty((rows, -(-cells // _STRIDE)))
    sums[:, :whole] = weights[:, : whole * _STRIDE].reshape(rows, whole, _STRIDE).sum(axis=2)
    if whole < sums.shape[1]:
        sums[:, whole] = weights[:, whole * _STRIDE :].sum(axis=1)
    np.cumsum(sums, axis=1, out=sums)
    wanted = uniforms * sums[:, -1]
    stride = np.minimum((sums <= wanted[:, None]).sum(axis=1), sums.shape[1] - 1)
    every = np.arange(rows)
    wanted -= np.where(stride > 0, sums[every, stride - 1], 0.0)
    columns = stride[:, None] * _STRIDE + np.arange(_STRIDE)
    inside = np.where(columns < cells, weights[every[:, None], np.minimum(columns, cells - 1)], 0.0)
    running = inside.cumsum(axis=1, dtype=np.float64)
    # Sums in different orders differ in their last bits, so the result is limited to the last cell with a
    # weight.
    cell = np.minimum((running <= wanted[:, None]).sum(axis=1), (running < running[:, -1:]).sum(axis=1))
    found: Array = columns[every, cell]
    return found


def _draw_filtered(logits: Array, how: SamplingSettings, uniform: float) -> int:
    """Draw a token that `top_k` and `top_p` allow.

    `top_k` leaves that many likeliest tokens. Of these, `top_p` leaves the fewest that together have this
    share of their probability.
    """
    order = _find_candidates(logits, how)
    weights = np.exp(logits[order], dtype=np.float64)
    if how.top_p < 1:
        whole = weights.sum() if how.top_k > 0 else np.exp(logits).sum(dtype=np.float64)
        before = weights.cumsum() - weights
        weights = weights[: max(1, int((before < how.top_p * whole).sum()))]
    running = weights.cumsum()
    place = int(np.searchsorted(running, uniform * running[-1], side="right"))
    return int(order[min(place, len(weights) - 1)])


def _find_candidates(logits: Array, how: SamplingSettings) -> Array:
    """Return the likeliest tokens, in falling order: at least all tokens that may be drawn.

    Equally likely tokens are in the order of their ids.
    """
    count = how.top_k if how.top_k > 0 else len(logits)
    if how.top_k <= 0 and len(logits) > _NUCLEUS:
        first = np.argpartition(-logits, _NUCLEUS)[:_NUCLEUS]
        covered = np.exp(logits[first]).sum(dtype=np.float64) / np.exp(logits).sum(dtype=np.float64)
        count = _NUCLEUS if covered > how.top_p + 1e-6 else count
    return top(logits, count)


def top(logits: Array, count: int) -> Array:
    """Return the indexes of the `count` largest cells of a row, the largest first.

    Equal cells are in the order of their indexes.

    >>> top(np.array([1.0, 3.0, 2.0, 3.0]), 3).tolist()
    [1, 3, 2]
    """
    if 0 < count < len(logits):
        edge = np.partition(logits, len(logits) - count)[len(logits) - count]
        above, equal = np.flatnonzero(logits > edge), np.flatnonzero(logits == edge)
        found = np.concatenate([above, equal[: count - len(above)]])
    else:
        found = np.arange(len(logits) if count else 0)
    order: Array = found[np.argsort(-logits[found], kind="stable")]
    return order
