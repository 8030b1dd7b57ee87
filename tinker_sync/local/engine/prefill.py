"""Computation of prompts: keys and values, the logits after the last token, and the requested scores.

A prompt's beginning may be known from the cache, which holds prompts without the tokens sampled after them.
Prompts that have equally many known positions, and after padding equally many unknown ones, share attention
calls.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from tinker_sync.local.engine import head, ops
from tinker_sync.local.engine._arrays import Array, round_up
from tinker_sync.local.engine.attention import attend_block
from tinker_sync.local.engine.choose import Draws, invert_cdf, top
from tinker_sync.local.engine.decoder import hidden_states
from tinker_sync.local.engine.lora import AdapterRoute, LoraParams
from tinker_sync.local.engine.model import Weights
from tinker_sync.local.engine.sample_spec import PromptScores, SampleSpec, empty_topk


class Past(NamedTuple):
    """The keys and values `[layers, kv_heads, positions, head_dim]` of a prompt's beginning."""

    keys: Array
    values: Array

    @property
    def length(self) -> int:
        """The number of positions."""
        return int(self.keys.shape[2])


class _KnownPrompt(NamedTuple):
    params: LoraParams | None  # compared by identity; this reference keeps the identity from being reused
    tokens: Array
    past: Past


class PrefixStore:
    """A cache of the keys and values of the prompts used last, at most `limit` positions. Not thread-safe.

    >>> import numpy as np
    >>> store = PrefixStore(limit=64)
    >>> store.remember(None, np.arange(20), Past(np.zeros((1, 1, 20, 2)), np.zeros((1, 1, 20, 2))))
    >>> past = store.find(None, np.arange(30), most=29)
    >>> past.length, store.find(None, np.arange(9), most=9).length
    (20, 9)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[int, _KnownPrompt] = OrderedDict()
        self._next = 0
        self._held = 0

    def keeps(self, length: int) -> bool:
        """Return True if a prompt of this length fits into the store."""
        return length <= self._limit

    def find(self, params: LoraParams | None, tokens: Array, most: int) -> Past | None:
        """Return the keys and values of the longest cached beginning of `tokens[:most]`, if there is one."""
        best, length = None, 0
        for name, entry in self._entries.items():
            common = _common(entry.tokens, tokens[:most]) if entry.params is params else 0
            if common > length:
                best, length = name, common
        if best is None:
            return None
        self._entries.move_to_end(best)
        past = self._entries[best].past
        return Past(past.keys[:, :, :length], past.values[:, :, :length])

    def remember(self, params: LoraParams | None, tokens: Array, past: Past) -> None:
        """Cache a prompt that fits and is not cached yet.

        Drop the cached prompts with which the new one begins, and the least recently used ones to make room.
        """
        length = len(tokens)
        if not self.keeps(length):
            return
        known = [name for name, entry in self._entries.items() if entry.params is params]
        for name in known:
            common = _common(self._entries[name].tokens, tokens)
            if common == length:
                return
            if common == len(self._entries[name].tokens):
                self._forget(name)  # the new prompt begins with this one
        while self._held + length > self._limit:
            self._forget(next(iter(self._entries)))
        kept = Past(past.keys.copy(), past.values.copy())
        self._entries[self._next] = _KnownPrompt(params, tokens.copy(), kept)
        self._next += 1
        self._held += length

    def forget(self, params: LoraParams | None) -> None:
        """Drop all prompts of an adapter, so that it can be freed."""
        for name in [name for name, entry in self._entries.items() if entry.params is params]:
            self._forget(name)

    def _forget(self, name: int) -> None:
        self._held -= len(self._entries.pop(name).tokens)


def _common(one: Array, two: Array) -> int:
    """Return the number of tokens with which both arrays begin."""
    size = min(len(one), len(two))
    differs = one[:size] != two[:size]
    return int(differs.argmax()) if differs.any() else size


_STEP = 8
"""The computed rows of a prompt are padded to a multiple of this, so that similar lengths share a call."""

_BLOCK = 64
"""The number of queries computed at once; a block of queries reads only the keys up to its own end."""

_ALTERNATIVES = -1
"""The number of the random stream that draws alternatives; samples have the numbers from 0 on."""


class Prompt(NamedTuple):
    """A prompt to compute, and its cached beginning."""

    spec: SampleSpec
    past: Past | None

    @property
    def known(self) -> int:
        """The number of cached positions."""
        return 0 if self.past is None else self.past.length

    @property
    def rows(self) -> int:
        """The number of rows to compute, with padding."""
        return round_up(len(self.spec.prompt) - self.known, _STEP)


class Prefilled(NamedTuple):
    """A computed prompt: its keys and values, the logits after its last token, and the requested scores."""

    past: Past
    logits: Array
    scores: PromptScores


class _Group(NamedTuple):
    """Prompts with equally many known and computed rows: their indexes, first row, keys and values.

    The keys and values are `[layers, prompts, kv_heads, positions, head_dim]`.
    """

    members: list[int]
    start: int
    known: int
    rows: int
    keys: Array
    values: Array


def group_by_adapter(params: list[LoraParams | None]) -> list[AdapterRoute]:
    """Group the rows of a batch by adapter; `params` has the adapter of each row."""
    rows: dict[int, list[int]] = {}
    for row, one in enumerate(params):
        rows.setdefault(id(one), []).append(row)
    if len(rows) == 1:
        return [AdapterRoute(params[0])]
    return [AdapterRoute(params[members[0]], np.array(members)) for members in rows.values()]


def prefill(weights: Weights, prompts: list[Prompt]) -> list[Prefilled]:
    """Compute all prompts in one pass, and return the results in the order of the prompts."""
    groups, order = _group_by_shape(weights, prompts)
    total = sum(prompt.rows for prompt in prompts)
    tokens, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    owners: list[LoraParams | None] = []
    starts = dict.fromkeys(order, 0)
    for number in order:
        prompt, start = prompts[number], len(owners)
        rest = prompt.spec.prompt[prompt.known :]
        tokens[start : start + len(rest)] = rest
        positions[start : start + prompt.rows] = np.arange(prompt.known, prompt.known + prompt.rows)
        starts[number] = start
        owners += [prompt.spec.params] * prompt.rows
    turn = ops.rotation(weights.config, positions, weights.dtype)
    hidden = hidden_states(weights, tokens, turn, group_by_adapter(owners), _PromptAttention(groups))
    logits = _last_logits(weights, prompts, hidden, starts)
    done: dict[int, Prefilled] = {}
    for group in groups:
        for place, number in enumerate(group.members):
            prompt, size = prompts[number], len(prompts[number].spec.prompt)
            past = Past(group.keys[:, place, :, :size], group.values[:, place, :, :size])
            own = hidden[starts[number] :][: size - prompt.known]
            done[number] = Prefilled(past, logits[number], _score_prompt(weights, prompt, own))
    return [done[number] for number in range(len(prompts))]


def _group_by_shape(weights: Weights, prompts: list[Prompt]) -> tuple[list[_Group], list[int]]:
    config = weights.config
    shapes: dict[tuple[int, int], list[int]] = {}
    for number, prompt in enumerate(prompts):
        shapes.setdefault((prompt.known, prompt.rows), []).append(number)
    groups: list[_Group] = []
    start = 0
    for (known, rows), members in shapes.items():
        shape = (config.layers, len(members), config.kv_heads, known + rows, config.head_dim)
        keys, values = np.zeros(shape, dtype=weights.dtype), np.zeros(shape, dtype=weights.dtype)
        for place, number in enumerate(members):
            past = prompts[number].past
            if past is not None:
                keys[:, place, :, :known], values[:, place, :, :known] = past
        groups.append(_Group(members, start, known, rows, keys, values))
        start += rows * len(members)
    return groups, [number for group in groups for number in group.members]


class _PromptAttention:
    """The attention of prompts, which also stores their keys and values in the groups."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def __call__(self, number: int, q: Array, k: Array, v: Array) -> Array:
        out = np.zeros(q.shape, dtype=q.dtype)
        for group in self._groups:
            cut = (len(group.members), group.rows)
            rows = slice(group.start, group.start + cut[0] * cut[1])
            keys, values = group.keys[number], group.values[number]
            keys[:, :, group.known :] = k[rows].reshape(*cut, *k.shape[1:]).transpose(0, 2, 1, 3)
            values[:, :, group.known :] = v[rows].reshape(*cut, *v.shape[1:]).transpose(0, 2, 1, 3)
            queries = q[rows].reshape(*cut, *q.shape[1:])
            mixed = out[rows].reshape(*cut, *q.shape[1:])
            for start in range(0, group.rows, _BLOCK):
                end = min(start + _BLOCK, group.rows)
                block, seen = slice(start, end), slice(0, group.known + end)
                part, _ = attend_block(queries[:, block], keys[:, :, seen], values[:, :, seen])
                mixed[:, block].reshape(part.shape)[...] = part
        return out


def _last_logits(weights: Weights, prompts: list[Prompt], hidden: Array, starts: dict[int, int]) -> Array:
    """Return the logits after the last token of each prompt."""
    lasts = [starts[number] + len(one.spec.prompt) - one.known - 1 for number, one in enumerate(prompts)]
    return head.logits(weights, hidden[lasts], group_by_adapter([prompt.spec.params for prompt in prompts]))


def _score_prompt(weights: Weights, prompt: Prompt, hidden: Array) -> PromptScores:
    """Return the requested scores of a prompt. `hidden` has its hidden states, from position `known` on."""
    spec = prompt.spec
    size, first = len(spec.prompt), spec.first_scored
    found = _empty_scores(spec)
    if first >= size - 1:
        return found
    rows = np.arange(first, size - 1)
    shown_from = size - 1 - (spec.prompt_logprobs_last_n or size - 1)
    draws = Draws(spec.seed, _ALTERNATIVES).block(size - 1, max(1, spec.prompt_alt_tokens))
    for block in head.blocks(weights, len(rows)):
        at = rows[block]
        logprobs = head.log_softmax(
            head.logits(weights, hidden[at - prompt.known], [AdapterRoute(spec.params)])
        )
        _write_scores(found, spec, at, logprobs, shown_from)
        _draw_alternatives(found, spec, at, logprobs, draws[at])
    return found


def _empty_scores(spec: SampleSpec) -> PromptScores:
    size, targets, k = len(spec.prompt), spec.target_prompt_logprobs, spec.prompt_alt_tokens
    return PromptScores(
        logprobs=np.full(size, np.nan, dtype=np.float32) if spec.prompt_logprobs else None,
        topk=empty_topk(size, spec.topk_prompt_logprobs) if spec.topk_prompt_logprobs else None,
        target_logprobs=None if targets is None else np.zeros(targets.shape, dtype=np.float32),
        alt_tokens=np.zeros((size - 1, k), dtype=np.int64) if k else None,
        alt_logprobs=np.zeros((size - 1, k), dtype=np.float32) if k else None,
    )


def _write_scores(found: PromptScores, spec: SampleSpec, at: Array, logprobs: Array, shown_from: int) -> None:
    """Write the requested scores of the tokens after the positions `at` into `found`.

    `found.logprobs` and `found.topk` get only the scores after positions from `shown_from` on.
    """
    shown = np.flatnonzero(at >= shown_from)
    if found.logprobs is not None:
        found.logprobs[at[shown] + 1] = logprobs[shown, spec.prompt[at[shown] + 1]]
    if found.topk is not None:
        for row in shown:
            best = top(logprobs[row], spec.topk_prompt_logprobs)
            found.topk.token_ids[at[row] + 1] = best
            found.topk.logprobs[at[row] + 1] = logprobs[row, best]
    targets = spec.target_prompt_logprobs
    if found.target_logprobs is not None and targets is not None:
        wanted = targets[at]
        scored = np.take_along_axis(logprobs, np.maximum(wanted, 0), axis=1)
        found.target_logprobs[at] = np.where(wanted >= 0, scored, 0.0)


def _draw_alternatives(
    found: PromptScores, spec: SampleSpec, at: Array, logprobs: Array, uniforms: Array
) -> None:
    """Draw alternatives to the tokens after the positions `at`, and write them and their scores into `found`.

    The draws are with replacement and may give the prompt's own token; temperature 0 repeats the likeliest
    one. Without `prompt_alt_tokens` this does nothing.
    """
    if found.alt_tokens is None or found.alt_logprobs is None:
        return
    if spec.temperature == 0:
        tokens = np.repeat(logprobs.argmax(axis=1)[:, None], spec.prompt_alt_tokens, axis=1)
    else:
        shifted = logprobs - logprobs.max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):
            weights = np.exp(shifted / shifted.dtype.type(max(spec.temperature, 1e-30)))
        tokens = np.stack([invert_cdf(weights, column) for column in uniforms.T], axis=1)
    found.alt_tokens[at] = tokens
    found.alt_logprobs[at] = np.take_along_axis(logprobs, tokens, axis=1)
