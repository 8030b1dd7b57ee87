"""What samples with `record_stability_info` leave behind: their tokens, and the log-probabilities they had.

The loss `stable_reinforce` takes the log-probabilities from here, not from the client. The spans of a datum
name the sampled sequence of each token. The event loop adds records, and the training thread reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from tinker_sync.local.server.problems import UserFault
from tinker_sync.types.datum import SampledProvenanceSpan

if TYPE_CHECKING:
    from tinker_sync.local.engine.losses import Example
    from tinker_sync.local.engine.safetensors import Array
    from tinker_sync.types.datum import Datum

STABLE_REINFORCE = "stable_reinforce"
LIMIT_BYTES = 128 * 1024 * 1024


class _Sequence(NamedTuple):
    tokens: Array
    logprobs: Array

    @property
    def size(self) -> int:
        return self.tokens.nbytes + self.logprobs.nbytes


class RecordedSamples:
    """The sampled sequences by id, up to `limit_bytes`; the oldest ones go first."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    def add(self, sequence_id: str, tokens: Array, logprobs: Array) -> None:
        """Record a sampled sequence."""
        made = _Sequence(np.asarray(tokens, dtype=np.int32), np.asarray(logprobs, dtype=np.float32))
        self._sequences[sequence_id] = made
        self._bytes += made.size
        while self._bytes > self._limit and len(self._sequences) > 1:
            self._bytes -= self._sequences.popitem(last=False)[1].size

    def complete(self, datum: Datum, example: Example, place: str) -> Example:
        """Return an example for `stable_reinforce` with the recorded log-probabilities as `logprobs`.

        Tokens of prompts count nothing: their advantages become 0.

        Args:
            datum: the datum, for its spans.
            example: the same datum in the form of the engine.
            place: the name of the datum in messages, such as `data[3]`.

        Raises:
            UserFault: the datum has no spans, or they do not fit what was recorded.
        """
        targets, advantages = (example.inputs.get(name) for name in ("target_tokens", "advantages"))
        if not isinstance(targets, np.ndarray) or not isinstance(advantages, np.ndarray):
            return example  # the engine says what it misses
        spans = datum.loss_fn_input_spans or ()
        if sum(span.length for span in spans) != len(targets) or not targets.shape == advantages.shape:
            raise UserFault(
                f"{place}: {STABLE_REINFORCE} needs the provenance of each target: "
                "Datum.with_provenance adds it, and so do data.from_sample and data.from_samples"
            )
        logprobs, counted, at = np.zeros(len(targets)), np.zeros(len(targets)), 0
        for span in spans:
            if isinstance(span, SampledProvenanceSpan) and span.length:
                rows, part = slice(at, at + span.length), slice(span.offset, span.offset + span.length)
                found = self._find(span.sequence_id, place)
                if not np.array_equal(found.tokens[part], targets[rows]):
                    raise UserFault(
                        f"{place}.loss_fn_inputs['target_tokens'][{at}:{rows.stop}]: differs from the tokens "
                        f"{part.start} to {part.stop} of the sampled sequence {span.sequence_id}"
                    )
                logprobs[rows], counted[rows] = found.logprobs[part], 1.0
            at += span.length
        inputs = {**example.inputs, "logprobs": logprobs, "advantages": advantages * counted}
        return attrs.evolve(example, inputs=inputs)

    def _find(self, sequence_id: str, place: str) -> _Sequence:
        found = self._sequences.get(sequence_id)
        if found is None:
            raise UserFault(
                f"{place}: nothing is recorded of the sampled sequence {sequence_id!r}; sample with a client "
                "that was made with record_stability_info=True, since the start of the server"
            )
        return found
