"""`divergence`: how far the model that is trained is from the one that sampled, on the sampled tokens.

For each token, `p` is the trainer's log-probability (an output of `forward` or `forward_backward`), `q` the
sampler's (the input `logprobs`), and `r = exp(p - q)` the importance ratio. A whole sequence has the product
of its ratios. All figures are float64, and no function loops over tokens in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import asdict, fields_dict, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses.evaluate import FloatArray
from tinker_sync.types import Datum, ForwardBackwardOutput, SampledProvenanceSpan

Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

QUANTILES: Final = (0.001, 0.01, 0.5, 0.99, 0.999)
"""The quantiles of the ratios that a `RatioFigures` has."""

# Ratios of larger exponents count as this one, so that one of them leaves the other figures finite.
_MOST: Final = 600.0
_BLOCK: Final = 1 << 17
# From here on `advice` has a sentence. KL: runs that sample and train with the same weights stay below a
# hundredth of a nat a token; above, their loss curves begin to differ.
_WIDE_KL: Final = 0.01
_FEW_EFFECTIVE: Final = 0.5
_MUCH_CLIPPED: Final = 0.2
_LONG_TAIL: Final = 100.0


@frozen(kw_only=True)
class RatioFigures:
    """Figures over the importance ratios of tokens, or of whole sequences.

    The samples come from the sampler. So means over them estimate KL(sampler, trainer) directly, and
    KL(trainer, sampler) after weighting with the ratio `r`. Estimator k1 may be negative; k3 has the same
    expectation, is never negative, and varies less while the two models are close.

    Attributes:
        count: the number of tokens or sequences.
        kl_sampler_trainer_k1: the mean of `-log r`.
        kl_sampler_trainer_k3: the mean of `r - 1 - log r`.
        kl_trainer_sampler_k1: the mean of `r * log r`.
        kl_trainer_sampler_k3: the mean of `r * log r - (r - 1)`.
        ratio_mean: the mean of `r`; its expectation is 1.
        ratio_min: the smallest ratio, which is the sample that the trainer finds least likely.
        ratio_max: the largest ratio.
        ratio_quantiles: the ratios at the quantiles 0.001, 0.01, 0.5, 0.99 and 0.999.
        effective_share: the effective sample size `sum(r)**2 / sum(r**2)`, as a share of `count`.
        below: the share of ratios below `clip_low`.
        above: the share of ratios above `clip_high`.
        clipped: the share without gradient under `ppo`: above with a positive advantage, or below with a
            negative one. Without advantages, `below + above`.
    """

    count: int
    kl_sampler_trainer_k1: float
    kl_sampler_trainer_k3: float
    kl_trainer_sampler_k1: float
    kl_trainer_sampler_k3: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    ratio_quantiles: Mapping[float, float]
    effective_share: float
    below: float
    above: float
    clipped: float


@frozen(kw_only=True, eq=False)
class SequenceFigures:
    """The figures of each datum as arrays, in the order of the data. A datum without tokens has NaN.

    Attributes:
        tokens: the number of tokens that count.
        log_ratio: the sum of `log r`, the logarithm of the ratio of the whole sequence. Divided by `tokens`,
            it is the logarithm of the ratio that `gspo` clips.
        kl_sampler_trainer_k1: the mean of `-log r` over the tokens; the following ones are also over tokens,
            and mean the same as in `RatioFigures`.
    """

    tokens: Counts
    log_ratio: FloatArray
    kl_sampler_trainer_k1: FloatArray
    kl_sampler_trainer_k3: FloatArray
    kl_trainer_sampler_k1: FloatArray
    kl_trainer_sampler_k3: FloatArray
    ratio_mean: FloatArray
    ratio_min: FloatArray
    ratio_max: FloatArray
    effective_share: FloatArray
    below: FloatArray
    above: FloatArray
    clipped: FloatArray


@frozen(kw_only=True, eq=False)
class Divergence:
    """The result of `divergence`. `StepRecorder.log` takes it as a result, and writes its `metrics`.

    Attributes:
        tokens: the figures over tokens.
        sequences: the figures over sequences, with the ratio of each whole sequence.
        by_sequence: the figures over the tokens of each sequence.
        not_finite: the number of tokens that are left out, because a log-probability is not finite.
        clip_low: the ratio below which a token counts as clipped.
        clip_high: the ratio above which a token counts as clipped.
    """

    tokens: RatioFigures
    sequences: RatioFigures
    by_sequence: SequenceFigures
    not_finite: int
    clip_low: float
    clip_high: float

    @property
    def metrics(self) -> dict[str, float]:
        """The figures by name, such as ``divergence/kl_sampler_trainer_k3`` of the tokens.

        Those of sequences begin with ``divergence/sequence/``.
        """
        return {
            **dict(_name_figures("divergence", self.tokens)),
            "divergence/not_finite": self.not_finite,
            **dict(_name_figures("divergence/sequence", self.sequences)),
        }

    @property
    def advice(self) -> list[str]:
        """What stands out, with its likely causes; empty if sampler and trainer agree.

        >>> from tinker_sync import Datum, ForwardBackwardOutput, ModelInput, TensorData
        >>> inputs = {"target_tokens": [2], "logprobs": [-1.0], "advantages": [1.0]}
        >>> output = ForwardBackwardOutput("x", [{"logprobs": TensorData([-3.0], "float32", [1])}])
        >>> divergence([Datum(ModelInput.from_ints([1]), inputs)], output).advice[0].partition(";")[0]
        'the sampler is not the trainer: KL(sampler, trainer) is 1.14 nats a token (0.01 or less is usual)'
        """
        return list(_find_advice(self))

    def __str__(self) -> str:
        lines = [f"{'':<24}{'tokens':>14}{'sequences':>14}"]
        pairs = zip(_name_figures("", self.tokens), _name_figures("", self.sequences), strict=True)
        lines += [f"{name[1:]:<24}{one:>14,.6g}{other:>14,.6g}" for (name, one), (_, other) in pairs]
        return "\n".join(lines + [f"- {each}" for each in self.advice])


def _name_figures(prefix: str, figures: RatioFigures) -> Iterator[tuple[str, float]]:
    for name, value in asdict(figures).items():
        if isinstance(value, Mapping):
            yield from ((f"{prefix}/ratio_p{100 * at:g}", each) for at, each in value.items())
        else:
            yield f"{prefix}/{name}", value


def _find_advice(found: Divergence) -> Iterator[str]:
    tokens = found.tokens
    if found.not_finite:
        yield (
            f"{found.not_finite:,} tokens have a log-probability that is not finite: the sampled token is "
            "impossible for one of the models, or the trained weights have overflowed"
        )
    if not tokens.count:
        return
    if tokens.kl_sampler_trainer_k3 > _WIDE_KL:
        yield (
            "the sampler is not the trainer: KL(sampler, trainer) is "
            f"{tokens.kl_sampler_trainer_k3:.3g} nats a token ({_WIDE_KL} or less is usual); sample with the "
            "weights that are trained, from the same prompt tokens, and give the sampler's log-probabilities"
        )
    if tokens.effective_share < _FEW_EFFECTIVE:
        yield (
            f"few tokens decide: the effective sample size is {tokens.effective_share:.0%} of "
            f"{tokens.count:,} tokens; sample more often, or use ppo or cispo, which bound the ratios"
        )
    if tokens.clipped > _MUCH_CLIPPED:
        yield (
            f"{tokens.clipped:.0%} of the tokens are clipped, so ppo learns nothing from them; "
            "take fewer or smaller steps with the same samples"
        )
    if tokens.ratio_max > _LONG_TAIL or tokens.ratio_min < 1 / _LONG_TAIL:
        yield (
            f"the ratios have long tails, from {tokens.ratio_min:.2g} to {tokens.ratio_max:.2g}: look at the "
            "tokens of these sequences for prompts or targets that are shifted, or sampled from other weights"
        )


def divergence(
    data: Sequence[Datum], outputs: ForwardBackwardOutput, *, clip_low: float = 0.8, clip_high: float = 1.2
) -> Divergence:
    """Compare the log-probabilities of the trainer with those of the sampler, on the sampled tokens.

    A token counts if its `weights`, `mask` or `sequence_ratio_mask` is not 0, whichever the datum has first.
    Without these, the provenance spans of a datum name its sampled tokens. Without spans, a token counts
    if its log-probability or its advantage is not 0, because `data.from_samples` gives 0 to prompts.

    Args:
        data: the examples, with `target_tokens` and the sampler's `logprobs`.
        outputs: the result of `forward` or `forward_backward` for these data, computed with the weights to
            compare.
        clip_low: the ratio below which a token counts as clipped.
        clip_high: the ratio above which a token counts as clipped.

    Raises:
        InvalidInputError: a datum or its output lacks what is needed, or the shapes differ; the text names
            the datum.

    >>> from tinker_sync import ModelInput, TensorData
    >>> inputs = {"target_tokens": [2, 3], "logprobs": [0.0, -1.0], "advantages": [0.0, 1.0]}
    >>> datum = Datum(ModelInput.from_ints([1, 2]), inputs)
    >>> output = ForwardBackwardOutput("x", [{"logprobs": TensorData([-0.5, -0.75], "float32", [2])}])
    >>> found = divergence([datum], output)
    >>> found.tokens.count, round(found.tokens.ratio_mean, 4), found.tokens.above
    (1, 1.284, 1.0)
    """
    if not 0 < clip_low <= clip_high:
        raise InvalidInputError(
            f"divergence: expected 0 < clip_low <= clip_high, got {clip_low=}, {clip_high=}"
        )
    records = getattr(outputs, "loss_fn_outputs", None)
    if records is None:
        raise InvalidInputError(
            "divergence: outputs: expected the result of forward or forward_backward, got "
            f"{type(outputs).__name__}; give future.result()"
        )
    if len(records) != len(data):
        raise InvalidInputError(f"divergence: there are {len(records)} outputs for {len(data)} data")
    rows = [
        _read(index, datum, record) for index, (datum, record) in enumerate(zip(data, records, strict=True))
    ]
    has_advantages = all(advantages is not None for _, _, advantages, _ in rows)
    pieces: list[FloatArray] = []
    runs: list[_Runs] = []
    not_finite = 0
    for block in _split(rows):
        log_ratio, advantages, lengths, lost = _join(block)
        not_finite += lost
        flags = _clip(log_ratio, advantages if has_advantages else None, clip_low, clip_high)
        pieces.append(log_ratio)
        runs.append(_sum_runs(log_ratio, advantages, flags, lengths))
    whole = _join_runs(runs)
    # The tokens of a sequence usually have one advantage; where they differ, the sign of the sum decides.
    some = whole.lengths > 0
    of_sequences, signs = whole.log_ratio[some], whole.advantages[some]
    flags = _clip(of_sequences, signs if has_advantages else None, clip_low, clip_high)
    ones = np.ones(len(of_sequences), dtype=np.int64)
    return Divergence(
        tokens=_describe(np.concatenate([np.zeros(0), *pieces]), whole),
        sequences=_describe(of_sequences, _sum_runs(of_sequences, signs, flags, ones)),
        by_sequence=_describe_each(whole),
        not_finite=not_finite,
        clip_low=clip_low,
        clip_high=clip_high,
    )


# -------------------------------------------------------------------------------------- from data to arrays


_Row = tuple[Any, Any, Any, Flags]
"""The arrays of a datum: p, q, the advantages or None, and whether each token counts."""


def _read(index: int, datum: Datum, record: Mapping[str, Any]) -> _Row:
    inputs = datum.loss_fn_inputs
    where = f"divergence: data[{index}].loss_fn_inputs"
    for name in ("target_tokens", "logprobs"):
        if name not in inputs:
            raise InvalidInputError(f"{where}[{name!r}]: is missing; data.from_samples adds it")
    shape = tuple(inputs["target_tokens"].shape or (len(inputs["target_tokens"].data),))
    if len(shape) != 1:
        raise InvalidInputError(
            f"{where}['target_tokens']: has shape {shape}; a divergence needs one target a token"
        )
    if "logprobs" not in record:
        raise InvalidInputError(f"divergence: outputs[{index}]: has no logprobs")
    p, q = record["logprobs"].to_numpy().reshape(-1), inputs["logprobs"].to_numpy()
    for name, array in ((f"divergence: outputs[{index}]['logprobs']", p), (f"{where}['logprobs']", q)):
        if array.shape != shape:
            raise InvalidInputError(f"{name}: has shape {array.shape}, target_tokens have {shape}")
    advantages = None
    if "advantages" in inputs:
        advantages = _spread(inputs["advantages"].to_numpy(), shape, f"{where}['advantages']")
    return p, q, advantages, _find_counted(datum, shape, where, q, advantages)


def _spread(array: Any, shape: tuple[int, ...], where: str) -> Any:
    if array.shape not in ((), shape):
        raise InvalidInputError(f"{where}: has shape {array.shape}, target_tokens have {shape}")
    return np.broadcast_to(array, shape)


def _find_counted(datum: Datum, shape: tuple[int, ...], where: str, q: Any, advantages: Any) -> Flags:
    for name in ("weights", "mask", "sequence_ratio_mask"):
        if name in datum.loss_fn_inputs:
            counted: Flags = _spread(datum.loss_fn_inputs[name].to_numpy(), shape, f"{where}[{name!r}]") != 0
            return counted
    spans = datum.loss_fn_input_spans
    if spans is not None and sum(span.length for span in spans) == shape[0]:
        sampled = [isinstance(span, SampledProvenanceSpan) for span in spans]
        return np.repeat(np.array(sampled, dtype=bool), [span.length for span in spans])
    counted = np.asarray(q != 0)
    if advantages is not None:
        counted |= advantages != 0
    return counted


def _split(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Yield the rows in blocks of about `_BLOCK` tokens, because their arrays fit into the cache."""
    block: list[_Row] = []
    size = 0
    for row in rows:
        block.append(row)
        size += len(row[0])
        if size >= _BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _join(rows: Sequence[_Row]) -> tuple[FloatArray, FloatArray, Counts, int]:
    """Return log r and the advantage of each token that counts, the number of those by datum, and of others.

    Tokens whose ratio is not finite are left out, and counted.
    """
    log_ratio = np.subtract(
        np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows]), dtype=np.float64
    )
    given = [np.zeros(len(p)) if advantages is None else advantages for p, _, advantages, _ in rows]
    advantages = np.concatenate(given)
    counted = np.concatenate([own for _, _, _, own in rows])
    finite = np.isfinite(log_ratio)
    not_finite = 0
    if not finite.all():
        not_finite = int(np.count_nonzero(counted & ~finite))
        counted &= finite
    lengths = np.array([len(row[0]) for row in rows], dtype=np.int64)
    lengths = _reduce(np.add, counted, lengths).astype(np.int64)
    if not counted.all():
        log_ratio, advantages = log_ratio[counted], advantages[counted]
    return log_ratio, advantages, lengths, not_finite


# ------------------------------------------------------------------------------------- from arrays to figures


_Flagged = tuple["Flags", "Flags", "Flags"]
"""For each ratio: whether it is below the lower threshold, above the upper one, and clipped."""


def _clip(log_ratio: FloatArray, advantages: FloatArray | None, low: float, high: float) -> _Flagged:
    below, above = log_ratio < math.log(low), log_ratio > math.log(high)
    if advantages is None:
        return below, above, below | above
    return below, above, (above & (advantages > 0)) | (below & (advantages < 0))


@frozen(kw_only=True, eq=False)
class _Runs:
    """Sums over runs of ratios, which are the tokens of a sequence, with an entry for each run.

    `least` and `most` are the extreme logarithms. `shares` and `squares` are the sums of the ratios and of
    their squares, relative to the largest ratio of the run, because squares leave the range of float64.
    """

    lengths: Counts
    log_ratio: FloatArray
    advantages: FloatArray
    sums: dict[str, FloatArray]
    least: FloatArray
    most: FloatArray
    shares: FloatArray
    squares: FloatArray


def _sum_runs(log_ratio: FloatArray, advantages: FloatArray, flags: _Flagged, lengths: Counts) -> _Runs:
    most = _reduce(np.maximum, log_ratio, lengths)
    shares = np.exp(log_ratio - np.repeat(most, lengths))
    return _Runs(
        lengths=lengths,
        log_ratio=_reduce(np.add, log_ratio, lengths),
        advantages=_reduce(np.add, advantages, lengths),
        sums={name: _reduce(np.add, values, lengths) for name, values in _means(log_ratio, flags)},
        least=_reduce(np.minimum, log_ratio, lengths),
        most=most,
        shares=_reduce(np.add, shares, lengths),
        squares=_reduce(np.add, shares * shares, lengths),
    )


def _join_runs(parts: Sequence[_Runs]) -> _Runs:
    if not parts:
        nothing = np.zeros(0)
        return _sum_runs(nothing, nothing, _clip(nothing, None, 1.0, 1.0), np.zeros(0, dtype=np.int64))
    return _Runs(
        sums={name: np.concatenate([each.sums[name] for each in parts]) for name in parts[0].sums},
        **{
            name: np.concatenate([getattr(each, name) for each in parts])
            for name in ("lengths", "log_ratio", "advantages", "least", "most", "shares", "squares")
        },
    )


def _describe(log_ratio: FloatArray, runs: _Runs) -> RatioFigures:
    """Return the figures over all ratios. The array of their logarithms is overwritten."""
    count = len(log_ratio)
    if not count:
        empty: dict[str, Any] = dict.fromkeys(fields_dict(RatioFigures), math.nan)
        empty.update(count=0, ratio_quantiles=dict.fromkeys(QUANTILES, math.nan))
        return RatioFigures(**empty)
    most = float(np.nanmax(runs.most))
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.nan_to_num(np.exp(runs.most - most))
        shares, squares = float(scale @ runs.shares), float(scale**2 @ runs.squares)
        ratio = np.exp(np.minimum(log_ratio, _MOST, out=log_ratio), out=log_ratio)
    return RatioFigures(
        count=count,
        ratio_min=_exp(float(np.nanmin(runs.least))),
        ratio_max=_exp(most),
        ratio_quantiles=dict(
            zip(QUANTILES, np.quantile(ratio, QUANTILES, overwrite_input=True).tolist(), strict=True)
        ),
        effective_share=shares**2 / squares / count,
        **{name: float(values.sum()) / count for name, values in runs.sums.items()},
    )


def _describe_each(runs: _Runs) -> SequenceFigures:
    with np.errstate(invalid="ignore", divide="ignore"):
        return SequenceFigures(
            tokens=runs.lengths,
            log_ratio=runs.log_ratio,
            ratio_min=np.exp(np.minimum(runs.least, _MOST)),
            ratio_max=np.exp(np.minimum(runs.most, _MOST)),
            effective_share=runs.shares**2 / runs.squares / runs.lengths,
            **{name: values / runs.lengths for name, values in runs.sums.items()},
        )


def _exp(log_ratio: float) -> float:
    return math.exp(min(log_ratio, _MOST))


def _means(log_ratio: FloatArray, flags: _Flagged) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the figures that are means, each with the values to average; one array at a time is alive."""
    # expm1, because the difference of a ratio near 1 from 1 would lose the digits that the KL consists of.
    grown = np.expm1(np.minimum(log_ratio, _MOST))
    yield "kl_sampler_trainer_k1", -log_ratio
    yield "kl_sampler_trainer_k3", grown - log_ratio
    weighted = grown * log_ratio
    yield "kl_trainer_sampler_k1", weighted + log_ratio
    yield "kl_trainer_sampler_k3", weighted + log_ratio - grown
    yield "ratio_mean", grown + 1
    yield from zip(("below", "above", "clipped"), flags, strict=True)


def _reduce(ufunc: np.ufunc, values: npt.NDArray[Any], lengths: Counts) -> FloatArray:
    """Reduce each run of values, given the lengths of the runs. An empty run becomes NaN, and 0 if added."""
    some = lengths > 0
    reduced = np.full(len(lengths), 0.0 if ufunc is np.add else math.nan)
    if some.any():
        starts = (np.cumsum(lengths) - lengths)[some]
        exact = np.int64 if values.dtype == bool else np.float64
        reduced[some] = ufunc.reduceat(values, starts, dtype=exact)
    return reduced
