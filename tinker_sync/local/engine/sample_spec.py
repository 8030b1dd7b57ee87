"""The requests and results of `Sampler`, as plain values, and the check of a request."""

from __future__ import annotations

import math

import attrs
import numpy as np

from tinker_sync.local.engine._arrays import Array, describe_bad_token
from tinker_sync.local.engine.choose import SamplingSettings
from tinker_sync.local.engine.lora import LoraParams
from tinker_sync.local.engine.model import ModelConfig


@attrs.frozen(eq=False, kw_only=True)
class SampleSpec:
    """One request to a `Sampler`: a prompt, the way to continue it, and the scores to compute.

    Attributes:
        prompt: Token ids, at least one.
        seed: The seed of every draw, together with the number of the sample.
        max_tokens: The largest length of one sample, without the prompt.
        params: A `snapshot` of an adapter, or None for the base model.
        stop_tokens: Ids after which a sample ends.
        stop_texts: Texts after which a sample ends.
        prompt_logprobs: Score the prompt.
        prompt_logprobs_last_n: Score only this many last tokens of the prompt; applies to
            `topk_prompt_logprobs` too. None: all but the first.
        topk_prompt_logprobs: The number of likeliest tokens to return for each prompt token.
        topk_logprobs: The number of likeliest tokens to return for each sampled token.
        target_prompt_logprobs: Ids `[len(prompt) - 1, n]`. Those of row `i` are scored as if they stood in
            place of prompt token `i + 1`; -1 marks an empty cell.
        prompt_alt_tokens: The number of tokens to draw in place of each prompt token except the first.
    """

    prompt: Array
    seed: int
    max_tokens: int
    params: LoraParams | None = None
    num_samples: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    target_prompt_logprobs: Array | None = None
    prompt_alt_tokens: int = 0

    @property
    def settings(self) -> SamplingSettings:
        """The settings for the choice of each token."""
        return SamplingSettings(self.temperature, self.top_k, self.top_p)

    @property
    def first_scored(self) -> int:
        """The first prompt position whose next token needs a score; the last position if none does."""
        last = len(self.prompt) - 1
        if self.target_prompt_logprobs is not None or self.prompt_alt_tokens:
            return 0
        if self.prompt_logprobs or self.topk_prompt_logprobs:
            return 0 if self.prompt_logprobs_last_n is None else last - self.prompt_logprobs_last_n
        return last


@attrs.frozen(eq=False)
class TopK:
    """The `k` likeliest tokens at each position, as `[tokens, k]`; NaN marks absent scores."""

    token_ids: Array
    logprobs: Array


@attrs.frozen(eq=False)
class Sampled:
    """One sample. `tokens` includes the stop token, or the tokens of the stop text, that ended the sample.

    `stop_reason` is "stop" or "length".
    """

    tokens: Array
    logprobs: Array
    stop_reason: str
    topk: TopK | None = None


@attrs.frozen(eq=False, kw_only=True)
class PromptScores:
    """The requested scores of a prompt; None for those that were not requested.

    `logprobs` and `topk` have NaN for tokens without a score, such as the first.
    """

    logprobs: Array | None = None
    topk: TopK | None = None
    target_logprobs: Array | None = None
    alt_tokens: Array | None = None
    alt_logprobs: Array | None = None


@attrs.frozen(eq=False)
class SampleResult:
    """The result of a `SampleSpec`: samples, prompt scores, and how many prompt tokens the cache had."""

    samples: list[Sampled]
    prompt: PromptScores
    prompt_cache_hit_tokens: int


def check_spec(spec: SampleSpec, config: ModelConfig) -> None:
    """Check that a request can be computed.

    Raises:
        ValueError: a field is bad; the message names it.
    """
    size, vocab = len(spec.prompt), config.vocab_size
    if spec.prompt.ndim != 1 or not size or spec.prompt.dtype.kind not in "iu":
        raise ValueError(
            f"prompt: must be at least one token id, got {spec.prompt.dtype} {spec.prompt.shape}"
        )
    if not (spec.prompt.min() >= 0 and spec.prompt.max() < vocab):
        raise ValueError(f"prompt: {describe_bad_token(spec.prompt, vocab)}")
    if spec.max_tokens < 1:
        raise ValueError(f"max_tokens: must be at least 1, got {spec.max_tokens}")
    if size + spec.max_tokens > config.max_positions:
        both, most = f"{size} of the prompt and {spec.max_tokens} more", config.max_positions
        raise ValueError(f"max_tokens: {both}, the model takes {most}")
    if spec.num_samples < 1:
        raise ValueError(f"num_samples: must be at least 1, got {spec.num_samples}")
    _check_choice(spec)
    _check_scores(spec, size, vocab)
    if spec.params is not None and spec.params.flat.flags.writeable:
        raise ValueError("params: must be a snapshot, which cannot change during sampling")


def _check_choice(spec: SampleSpec) -> None:
    if not (math.isfinite(spec.temperature) and spec.temperature >= 0):
        raise ValueError(f"temperature: must be finite and not negative, got {spec.temperature}")
    if spec.top_k != -1 and spec.top_k < 1:
        raise ValueError(f"top_k: must be -1 (off) or at least 1, got {spec.top_k}")
    if not 0 < spec.top_p <= 1:
        raise ValueError(f"top_p: must be above 0 and at most 1, got {spec.top_p}")
    if "" in spec.stop_texts:
        raise ValueError("stop: an empty text would stop everything")


def _check_scores(spec: SampleSpec, size: int, vocab: int) -> None:
    for field in ("topk_prompt_logprobs", "topk_logprobs"):
        if not 0 <= getattr(spec, field) <= vocab:
            raise ValueError(f"{field}: must be 0 … {vocab}, got {getattr(spec, field)}")
    if spec.prompt_alt_tokens < 0:
        raise ValueError(f"prompt_alt_tokens_k: must not be negative, got {spec.prompt_alt_tokens}")
    last_n, targets = spec.prompt_logprobs_last_n, spec.target_prompt_logprobs
    if last_n is not None:
        if not (spec.prompt_logprobs or spec.topk_prompt_logprobs):
            raise ValueError("prompt_logprobs_last_n: goes with prompt_logprobs")
        if not 1 <= last_n <= size - 1:
            raise ValueError(f"prompt_logprobs_last_n: must be 1 … {size - 1} for this prompt, got {last_n}")
    if targets is not None:
        if targets.dtype.kind not in "iu" or targets.ndim != 2 or len(targets) != size - 1:
            got = f"{targets.dtype} {targets.shape}"
            raise ValueError(f"target_prompt_logprobs: must be integers of shape ({size - 1}, n), got {got}")
        if not targets.size or not (targets.min() >= -1 and targets.max() < vocab) or (targets == -1).all():
            raise ValueError(f"target_prompt_logprobs: at least one id, all of them -1 … {vocab - 1}")


def empty_topk(rows: int, count: int) -> TopK:
    """Return a `TopK` without scores.

    >>> empty_topk(2, 1).logprobs.tolist()
    [[nan], [nan]]
    """
    return TopK(np.zeros((rows, count), dtype=np.int32), np.full((rows, count), np.nan, dtype=np.float32))
