"""`Sampler`: computes all sample requests for a base model together, one token of each sample at a step.

`step` first computes waiting prompts, as far as there is room, and the first token of each new sample; then
it adds a token to every sample. One thread owns a sampler. Each sample has its own random numbers, so its
tokens depend on its request alone, except for rounding: the last bits of a product depend on the row's
position in the batch. If a random number is so close to the boundary between two tokens that these bits
decide, either token may be drawn.

The choice of a token inverts the cumulative distribution of its row of logits at a uniform random number that
the caller passes. So the token depends only on the row's logits, settings and number.

The keys and values of sequences of similar length share an `Arena`, a dense array with a slot for each
sequence. A sequence that is too long for its arena moves to a longer one, and the last sequence of the old
arena fills the free slot. So a step takes a few dense operations, and a short sequence is not computed at the
length of a long one.

The prefix of a prompt may be in the cache, which holds prompts without the tokens sampled after them. Prompts
that have equally many known positions, and after padding equally many unknown ones, share attention calls.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np

from tinker_sync.local.engine import decoder
from tinker_sync.local.engine.decoder import attend_block, describe_bad_token, hidden_states, round_up
from tinker_sync.local.engine.lora import AdapterRoute, LoraParams
from tinker_sync.local.engine.model import ModelConfig, Weights
from tinker_sync.local.engine.safetensors import Array

if TYPE_CHECKING:
    from typing import TypeAlias

# -------------------------------------------------------------------------------------- the choice of tokens


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

    The shifted logits of a row, minus its value in `totals`, are log-probabilities.
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


# -------------------------------------------------------------------------------------- requests and results


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
    """The result of a `SampleSpec`: samples, prompt scores, and the number of cached prompt tokens."""

    samples: list[Sampled]
    prompt: PromptScores
    prompt_cache_hit_tokens: int


def check_spec(spec: SampleSpec, config: ModelConfig) -> None:
    """Check what depends on the model, and what the types of the protocol leave to the server.

    Raises:
        ValueError: a field is bad; the message names it.
    """
    size, vocab, targets = len(spec.prompt), config.vocab_size, spec.target_prompt_logprobs
    if not size:
        raise ValueError("prompt: must be at least one token id")
    if not (spec.prompt.min() >= 0 and spec.prompt.max() < vocab):
        raise ValueError(f"prompt: {describe_bad_token(spec.prompt, vocab)}")
    if spec.max_tokens < 1:
        raise ValueError(f"max_tokens: must be at least 1, got {spec.max_tokens}")
    if size + spec.max_tokens > config.max_positions:
        both, most = f"{size} of the prompt and {spec.max_tokens} more", config.max_positions
        raise ValueError(f"max_tokens: {both}, the model takes {most}")
    if spec.top_k != -1 and spec.top_k < 1:
        raise ValueError(f"top_k: must be -1 (off) or at least 1, got {spec.top_k}")
    if "" in spec.stop_texts:
        raise ValueError("stop: an empty text would stop everything")
    for field in ("topk_prompt_logprobs", "topk_logprobs"):
        if getattr(spec, field) > vocab:
            raise ValueError(f"{field}: must be 0 … {vocab}, got {getattr(spec, field)}")
    if targets is not None and (
        not targets.size or targets.min() < -1 or targets.max() >= vocab or (targets == -1).all()
    ):
        raise ValueError(f"target_prompt_logprobs: at least one id, all of them -1 … {vocab - 1}")


def empty_topk(rows: int, count: int) -> TopK:
    """Return a `TopK` without scores.

    >>> empty_topk(2, 1).logprobs.tolist()
    [[nan], [nan]]
    """
    return TopK(np.zeros((rows, count), dtype=np.int32), np.full((rows, count), np.nan, dtype=np.float32))


# ------------------------------------------------------------------------------------------- keys and values


_SHORTEST = 64


def arena_length(positions: int) -> int:
    """Return the length of the arena for a number of positions: 64, 96, 128, 192, 256 ...

    >>> [arena_length(positions) for positions in (1, 65, 97, 129)]
    [64, 96, 128, 192]
    """
    length = _SHORTEST
    while length < positions:
        half = length + length // 2
        if half >= positions:
            return half
        length *= 2
    return length


class Seat:
    """A sequence in an `Arena`: its slot, its filled positions, and `owner`, an object of the caller."""

    __slots__ = ("arena", "filled", "owner", "slot")

    def __init__(self, owner: Any, arena: Arena, slot: int, filled: int) -> None:
        self.owner = owner
        self.arena = arena
        self.slot = slot
        self.filled = filled


class Arena:
    """Slots for sequences of up to `length` positions; slot `i` belongs to `seats[i]`."""

    def __init__(self, config: ModelConfig, length: int, dtype: Any) -> None:
        self.length = length
        self.seats: list[Seat] = []
        self.keys = np.zeros((config.layers, 0, config.kv_heads, length, config.head_dim), dtype=dtype)
        self.values = self.keys.copy()

    def append(self, owner: Any, keys: Array, values: Array) -> Seat:
        """Add a sequence with keys and values `[layers, kv_heads, positions, head_dim]`."""
        slot, filled = len(self.seats), keys.shape[2]
        if slot == self.keys.shape[1]:
            self.keys, self.values = _double(self.keys), _double(self.values)
        self.keys[:, slot, :, :filled] = keys
        self.values[:, slot, :, :filled] = values
        self.seats.append(Seat(owner, self, slot, filled))
        return self.seats[slot]

    def remove(self, seat: Seat) -> None:
        """Remove a seat; the last seat moves into its slot."""
        last = self.seats.pop()
        if last is seat:
            return
        self.keys[:, seat.slot, :, : last.filled] = self.keys[:, last.slot, :, : last.filled]
        self.values[:, seat.slot, :, : last.filled] = self.values[:, last.slot, :, : last.filled]
        last.slot = seat.slot
        self.seats[seat.slot] = last


def _double(array: Array) -> Array:
    layers, slots, *rest = array.shape
    larger = np.zeros((layers, max(4, 2 * slots), *rest), dtype=array.dtype)
    larger[:, :slots] = array
    return larger


class KVCache:
    """The keys and values of all sequences in progress. Not thread-safe.

    >>> size = {"vocab_size": 9, "hidden_size": 8, "layers": 1, "mlp_size": 8}
    >>> config = ModelConfig(heads=2, kv_heads=1, head_dim=4, **size)
    >>> cache = KVCache(config, np.float32)
    >>> seat = cache.add("mine", np.zeros((1, 1, 70, 4)), np.zeros((1, 1, 70, 4)))
    >>> seat.arena.length, [seat.owner for seat in cache.seats()]
    (96, ['mine'])
    """

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        self._config = config
        self._dtype = dtype
        self._arenas: dict[int, Arena] = {}

    def add(self, owner: Any, keys: Array, values: Array) -> Seat:
        """Add a sequence, with room for one more position. Return its seat, which keeps `owner`."""
        length = arena_length(keys.shape[2] + 1)
        if length not in self._arenas:
            self._arenas[length] = Arena(self._config, length, self._dtype)
        return self._arenas[length].append(owner, keys, values)

    def grow(self, seat: Seat) -> Seat:
        """Return the seat. If it is full, move its sequence to a longer arena and return the new seat."""
        if seat.filled < seat.arena.length:
            return seat
        larger = self.add(seat.owner, seat.arena.keys[:, seat.slot], seat.arena.values[:, seat.slot])
        self.remove(seat)
        return larger

    def remove(self, seat: Seat) -> None:
        """Remove the seat of a sequence. An arena without seats is freed."""
        seat.arena.remove(seat)
        if not seat.arena.seats:
            del self._arenas[seat.arena.length]

    def seats(self) -> list[Seat]:
        """Return the seats of all sequences, in the order of the rows of `Continuation`."""
        return [seat for arena in self._arenas.values() for seat in arena.seats]

    def continuation(self) -> Continuation:
        """Start a step, which adds a position to every sequence, and return its attention."""
        return Continuation(list(self._arenas.values()))


class Continuation:
    """The attention of one step. It stores the key and value of each new row, and attends up to that row."""

    def __init__(self, arenas: list[Arena]) -> None:
        self._parts = []
        start = 0
        for arena in arenas:
            count = len(arena.seats)
            filled = np.array([seat.filled for seat in arena.seats])
            mask = np.where(np.arange(arena.length) > filled[:, None], -np.inf, 0.0).astype(arena.keys.dtype)
            self._parts.append(
                (arena, slice(start, start + count), np.arange(count), filled, mask[:, None, None])
            )
            start += count
            for seat in arena.seats:
                seat.filled += 1

    def __call__(self, number: int, q: Array, k: Array, v: Array) -> Array:
        """Compute the attention of layer `number` for one row of each seat, as `decoder.Attend` requires."""
        out = np.empty(q.shape, dtype=q.dtype)
        kv_heads, dim = k.shape[1:]
        scale = 1 / np.sqrt(q.dtype.type(dim))
        for arena, rows, slots, filled, mask in self._parts:
            keys, values = arena.keys[number, : len(slots)], arena.values[number, : len(slots)]
            keys[slots, :, filled] = k[rows]
            values[slots, :, filled] = v[rows]
            scores = (q[rows] * scale).reshape(len(slots), kv_heads, -1, dim) @ keys.swapaxes(-1, -2)
            scores += mask
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            mixed = scores @ values
            mixed /= total
            out[rows] = mixed.reshape(len(slots), *q.shape[1:])
        return out


# --------------------------------------------------------------------------------------------------- prompts


class Past(NamedTuple):
    """The keys and values `[layers, kv_heads, positions, head_dim]` of the prefix of a prompt."""

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
        """Return the keys and values of the longest cached prefix of `tokens[:most]`, if there is one."""
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

        Drop the cached prompts that are prefixes of the new one, and the least recently used ones to make
        room.
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
    """A prompt to compute, and its cached prefix."""

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
    turn = decoder.rotation(weights.config, positions, weights.dtype)
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
    return decoder.logits(
        weights, hidden[lasts], group_by_adapter([prompt.spec.params for prompt in prompts])
    )


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
    for block in decoder.blocks(weights, len(rows)):
        at = rows[block]
        logprobs = decoder.log_softmax(
            decoder.logits(weights, hidden[at - prompt.known], [AdapterRoute(spec.params)])
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


# ----------------------------------------------------------------------------------------------- the sampler


Decode: TypeAlias = Callable[[list[int]], str]

PROMPT_ROWS = 2048
"""A step takes no further prompt beyond this number of positions; this bounds the delay of other samples."""

_BYTES_A_CHARACTER = 4


@attrs.define(eq=False)
class _ActiveRequest:
    """One request in progress."""

    ticket: int
    spec: SampleSpec
    known: int = 0
    prefilled: Prefilled | None = None
    done: dict[int, Sampled] = attrs.Factory(dict)
    cancelled: bool = False


@attrs.define(eq=False)
class _SampleRow:
    """One sample in progress; the keys and values of `tokens[-1]` are not yet in the `KVCache`."""

    job: _ActiveRequest
    number: int
    draws: Draws
    tokens: list[int] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    topk: list[tuple[Array, Array]] = attrs.Factory(list)
    seat: Seat | None = None


class Sampler:
    """The computation of all sample requests for one base model, with any of its adapters. Not thread-safe.

    Args:
        weights: The base model.
        decode: A function from token ids to text; needed only for stop texts.
        max_rows: The largest number of samples in progress at once; others wait.
        prefix_positions: The largest number of cached positions of earlier prompts.

    >>> from tinker_sync.local.engine.model import ModelConfig, random_weights
    >>> size = {"vocab_size": 9, "hidden_size": 8, "layers": 1, "mlp_size": 8}
    >>> config = ModelConfig(heads=2, kv_heads=1, head_dim=4, **size)
    >>> sampler = Sampler(random_weights(config, seed=0))
    >>> spec = SampleSpec(prompt=np.array([1, 2, 3]), seed=5, max_tokens=4, num_samples=2)
    >>> [len(sample.tokens) for sample in sampler.run([spec])[0].samples]
    [4, 4]
    """

    def __init__(
        self,
        weights: Weights,
        *,
        decode: Decode | None = None,
        max_rows: int = 256,
        prefix_positions: int = 1 << 16,
    ) -> None:
        self._weights = weights
        self._decode = decode
        self._max_rows = max_rows
        self._cache = KVCache(weights.config, weights.dtype)
        self._prefixes = PrefixStore(prefix_positions)
        self._jobs: dict[int, _ActiveRequest] = {}
        self._waiting: deque[_ActiveRequest] = deque()
        self._ready: deque[_SampleRow] = deque()
        self._finished: list[_ActiveRequest] = []
        self._tickets = 0

    @property
    def busy(self) -> bool:
        """True while there are unanswered requests."""
        return bool(self._jobs)

    def add(self, spec: SampleSpec) -> int:
        """Add a request.

        Returns:
            Its ticket, which `step` returns with the result.

        Raises:
            ValueError: the request cannot be computed; the message names the field.
        """
        check_spec(spec, self._weights.config)
        if spec.stop_texts:
            self._check_decoder()
        self._tickets += 1
        job = _ActiveRequest(self._tickets, spec)
        self._jobs[job.ticket] = job
        self._waiting.append(job)
        return job.ticket

    def _check_decoder(self) -> None:
        """Raise a ValueError if text cannot be decoded. A step that fails would fail all requests."""
        if self._decode is None:
            raise ValueError("stop: texts need a tokenizer, and there is none")
        try:
            self._decode([])
        except Exception as problem:
            raise ValueError(f"stop: texts need a tokenizer, which cannot be read: {problem}") from problem

    def cancel(self, ticket: int) -> None:
        """Drop a request. For an unknown or answered ticket, do nothing."""
        job = self._jobs.pop(ticket, None)
        if job is None:
            return
        job.cancelled = True
        self._waiting = deque(other for other in self._waiting if other is not job)
        self._ready = deque(row for row in self._ready if row.job is not job)
        for seat in self._cache.seats():
            if seat.owner.job is job:
                self._cache.remove(seat.owner.seat)

    def forget(self, params: LoraParams | None) -> None:
        """Drop the cached prompts of an adapter that is no longer used; None means the base model."""
        self._prefixes.forget(params)

    def run(self, specs: Sequence[SampleSpec]) -> list[SampleResult]:
        """Add requests, compute them, and return their results in order.

        The results of requests that `add` has added before are lost.
        """
        tickets = [self.add(spec) for spec in specs]
        results: dict[int, SampleResult] = {}
        while self.busy:
            results.update(self.step())
        return [results[ticket] for ticket in tickets]

    def step(self) -> list[tuple[int, SampleResult]]:
        """Compute waiting prompts and the first tokens of new samples, then one more token of every sample.

        Returns:
            Tickets and results of the requests that this step completed.
        """
        self._prefill()
        self._start()
        self._continue()
        finished, self._finished = self._finished, []
        return [(job.ticket, _result(job)) for job in finished]

    # ----------------------------------------------------------------------------------------- prompts

    def _prefill(self) -> None:
        jobs: list[_ActiveRequest] = []
        prompts: list[Prompt] = []
        room = self._max_rows - len(self._cache.seats()) - len(self._ready)
        rows = 0
        seen: set[tuple[int, bytes]] = set()
        twins: list[_ActiveRequest] = []
        while self._waiting and room > 0 and rows < PROMPT_ROWS:
            job = self._waiting.popleft()
            spec = job.spec
            name = id(spec.params), spec.prompt.tobytes()
            if name in seen and self._prefixes.keeps(len(spec.prompt)):
                twins.append(job)  # the same prompt is in this step; in the next one it is in the cache
                continue
            seen.add(name)
            past = self._prefixes.find(spec.params, spec.prompt, spec.first_scored)
            prompts.append(Prompt(spec, past))
            jobs.append(job)
            rows += prompts[-1].rows
            room -= spec.num_samples
        self._waiting.extendleft(reversed(twins))
        if not jobs:
            return
        for job, prompt, prefilled in zip(jobs, prompts, prefill(self._weights, prompts), strict=True):
            job.known, job.prefilled = prompt.known, prefilled
            self._prefixes.remember(job.spec.params, job.spec.prompt, prefilled.past)
            self._ready += (
                _SampleRow(job, number, Draws(job.spec.seed, number))
                for number in range(job.spec.num_samples)
            )

    def _start(self) -> None:
        """Choose the first token of ready samples while there is room.

        Samples that do not end with this token enter the `KVCache`.
        """
        room = self._max_rows - len(self._cache.seats())
        rows = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        if not rows:
            return
        logits = np.stack([row.job.prefilled.logits for row in rows if row.job.prefilled is not None])
        for row in self._choose_tokens(rows, logits):
            assert row.job.prefilled is not None  # noqa: S101
            row.seat = self._cache.add(row, *row.job.prefilled.past)

    # ------------------------------------------------------------------------------------ continuation

    def _continue(self) -> None:
        for seat in self._cache.seats():
            seat.owner.seat = self._cache.grow(seat)
        rows: list[_SampleRow] = [seat.owner for seat in self._cache.seats()]
        if not rows:
            return
        tokens = np.array([row.tokens[-1] for row in rows])
        positions = np.array([seat.filled for seat in self._cache.seats()])
        routes = group_by_adapter([row.job.spec.params for row in rows])
        turn = decoder.rotation(self._weights.config, positions, self._weights.dtype)
        hidden = hidden_states(self._weights, tokens, turn, routes, self._cache.continuation())
        logits = decoder.logits(self._weights, hidden, routes)
        going = {id(row) for row in self._choose_tokens(rows, logits)}
        for row in rows:
            if id(row) not in going and row.seat is not None:
                self._cache.remove(row.seat)

    def _choose_tokens(self, rows: list[_SampleRow], logits: Array) -> list[_SampleRow]:
        """Choose a token for each row, and finish samples that end with it. Return the rows that go on."""
        chosen = choose(logits, [row.job.spec.settings for row in rows], [row.draws.next() for row in rows])
        going = []
        for place, (row, token, logprob) in enumerate(
            zip(rows, chosen.tokens.tolist(), chosen.logprobs.tolist(), strict=True)
        ):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.job.spec.topk_logprobs:
                best = top(logits[place], row.job.spec.topk_logprobs)
                row.topk.append((best, logits[place, best] - chosen.totals[place]))
            reason = self._find_stop_reason(row)
            if reason is None:
                going.append(row)
            else:
                self._finish(row, reason)
        return going

    def _find_stop_reason(self, row: _SampleRow) -> str | None:
        spec = row.job.spec
        if row.tokens[-1] in spec.stop_tokens:
            return "stop"
        if spec.stop_texts and self._decode is not None:
            # Each token is at least a byte of text, and earlier steps have searched the earlier text.
            reach = _BYTES_A_CHARACTER * (max(map(len, spec.stop_texts)) + 1)
            text = self._decode(row.tokens[-reach:])
            if any(stop in text for stop in spec.stop_texts):
                return "stop"
        return "length" if len(row.tokens) >= spec.max_tokens else None

    def _finish(self, row: _SampleRow, reason: str) -> None:
        job = row.job
        topk = None
        if row.topk:
            ids, logprobs = (np.stack(column) for column in zip(*row.topk, strict=True))
            topk = TopK(ids.astype(np.int32), logprobs.astype(np.float32))
        tokens, logprobs = np.array(row.tokens, dtype=np.int32), np.array(row.logprobs, dtype=np.float32)
        job.done[row.number] = Sampled(tokens, logprobs, reason, topk)
        if len(job.done) == job.spec.num_samples:
            self._finished.append(self._jobs.pop(job.ticket))


def _result(job: _ActiveRequest) -> SampleResult:
    assert job.prefilled is not None  # noqa: S101
    samples = [job.done[number] for number in range(job.spec.num_samples)]
    return SampleResult(samples, job.prefilled.scores, job.known)
