"""Reinforcement-learning examples from samples with log-probabilities and advantages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_sync.data.completion import Shifted, TokenIds, as_ids, as_numbers, shift
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
)

if TYPE_CHECKING:
    from typing import TypeAlias

Advantages: TypeAlias = float | Sequence[float] | npt.NDArray[Any]
"""One number for the whole sample, or one for each sampled token."""

_ROUNDING = 1e-3
"""The most that rounding may lift a log-probability above 0."""


def from_sample(
    prompt: ModelInput | TokenIds,
    sequence: SampledSequence,
    advantages: Advantages,
    *,
    provenance: bool = True,
) -> Datum:
    """Make an example for `importance_sampling`, `ppo` and related losses.

    The prompt's tokens get log-probability and advantage 0, so they do not affect the loss.

    Args:
        prompt: the prompt of the sample.
        sequence: the sample.
        advantages: of the sample, or of each of its tokens.
        provenance: record the origin of the tokens, if the server gave the sequence an id.

    Raises:
        InvalidInputError: tokens, log-probabilities and advantages do not fit, or the prompt is empty.

    >>> sequence = SampledSequence("stop", "seq-1", np.array([3, 4]), np.array([-0.5, -0.25]))
    >>> datum = from_sample([1, 2], sequence, 2.0)
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([1, 2, 3], [2, 3, 4])
    >>> datum.loss_fn_inputs["logprobs"].tolist(), datum.loss_fn_inputs["advantages"].tolist()
    ([0.0, -0.5, -0.25], [0.0, 2.0, 2.0])
    """
    given = as_numbers(advantages, "advantages")
    problems = list(find_problems(sequence, given))
    before = prompt if isinstance(prompt, ModelInput) else ModelInput.from_ints(as_ids(prompt, "prompt"))
    if before.length == 0:
        problems.append("prompt: is empty; a sample needs a prompt of at least one token")
    if problems:
        raise InvalidInputError(problems)
    shifted = shift(before, as_ids(tokens_of(sequence), "sequence.tokens"))
    datum = Datum(
        shifted.model_input,
        {
            "target_tokens": shifted.targets,
            "logprobs": shifted.row(0.0, logprobs_of(sequence)),
            "advantages": shifted.row(0.0, given),
        },
    )
    named = provenance and sequence.sequence_id is not None
    return _add_spans(datum, shifted, str(sequence.sequence_id)) if named else datum


def from_samples(
    prompt: ModelInput | TokenIds,
    sampled: SampleResponse | Sequence[SampledSequence],
    advantages: Sequence[Advantages] | npt.NDArray[Any],
    *,
    provenance: bool = True,
) -> list[Datum]:
    """Make an example for each sample of one prompt.

    Args:
        prompt: the prompt of the samples.
        sampled: the response, or its sequences.
        advantages: for each sequence one number, or one for each of its tokens.
        provenance: as in `from_sample`.

    Raises:
        InvalidInputError: the number of advantages differs, or a sequence does not fit; the text names it.

    >>> group = [SampledSequence("stop", None, np.array([n]), np.array([-1.0])) for n in (3, 4)]
    >>> [datum.loss_fn_inputs["advantages"].tolist() for datum in from_samples([1], group, [0.5, -0.5])]
    [[0.5], [-0.5]]
    """
    sequences = sampled.sequences if isinstance(sampled, SampleResponse) else list(sampled)
    single = not hasattr(advantages, "__len__") or getattr(advantages, "shape", None) == ()
    if single or len(advantages) != len(sequences):
        got = "one number" if single else str(len(advantages))
        raise InvalidInputError(f"advantages: expected {len(sequences)}, one for each sequence, got {got}")
    made = []
    for index, (sequence, advantage) in enumerate(zip(sequences, advantages, strict=True)):
        try:
            made.append(from_sample(prompt, sequence, advantage, provenance=provenance))
        except InvalidInputError as error:
            raise InvalidInputError([f"sequences[{index}]: {each}" for each in error.problems]) from None
    return made


# ------------------------------------------------------------------------------------------- checks


def tokens_of(sequence: SampledSequence) -> TokenIds:
    """Return the tokens of a sample, as an array if it has one."""
    return sequence.tokens if sequence.tokens_np is None else sequence.tokens_np


def logprobs_of(sequence: SampledSequence) -> npt.NDArray[Any]:
    """Return the log-probabilities of a sample; an empty array if it has none."""
    given = sequence.logprobs if sequence.logprobs_np is None else sequence.logprobs_np
    return np.asarray(given if given is not None else [], dtype=np.float32)


def find_problems(sequence: SampledSequence, advantages: npt.NDArray[Any]) -> Iterator[str]:
    """Yield what keeps a sample and its advantages from being trained on."""
    count = len(tokens_of(sequence))
    if count == 0:
        yield "sequence: has no tokens"
    if sequence.logprobs_np is None and sequence.logprobs is None:
        yield "sequence: has no log-probabilities; the server gave none"
    else:
        yield from _find_logprob_problems(logprobs_of(sequence), count)
    if advantages.ndim and advantages.shape != (count,):
        shape = list(advantages.shape)
        yield f"advantages: expected one number or {count}, one for each sampled token, got shape {shape}"
    if not np.isfinite(advantages).all():
        yield f"advantages: expected finite numbers, got {advantages[~np.isfinite(advantages)].flat[0]}"


def _find_logprob_problems(logprobs: npt.NDArray[Any], count: int) -> Iterator[str]:
    if logprobs.shape != (count,):
        yield f"sequence: has {count} tokens and log-probabilities of shape {list(logprobs.shape)}"
        return
    bad = ~(np.isfinite(logprobs) & (logprobs <= _ROUNDING))
    if bad.any():
        index = int(np.argmax(bad))
        yield f"sequence: logprobs[{index}] is {logprobs[index]}, which is not a log-probability"


def _add_spans(datum: Datum, shifted: Shifted, sequence_id: str) -> Datum:
    """Return the datum with each position of input and targets marked as part of the prompt or the sample."""
    length = len(shifted.targets)
    prompt = shifted.first + 1
    return datum.with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=sequence_id, length=prompt),
            *_make_spans(SampledProvenanceSpan, sequence_id, 0, length - prompt),
        ],
        loss_fn_inputs=[
            *_make_spans(PromptProvenanceSpan, sequence_id, 1, prompt - 1),
            SampledProvenanceSpan(sequence_id=sequence_id, length=length - prompt + 1),
        ],
    )


def _make_spans(kind: Any, sequence_id: str, offset: int, length: int) -> list[Any]:
    return [kind(sequence_id=sequence_id, offset=offset, length=length)] if length else []
