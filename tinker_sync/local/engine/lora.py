"""Low-rank adapters: the adapted matrices, their initial values, and the products with them.

An adapted product is `x W' + scale * (x A') B'`. One flat array holds all numbers of an adapter, so an
optimizer step, a norm or a checkpoint is one operation. `LoraParams` gives views of such an array; the same
class serves for gradients. For matrices with the same input, one product covers all their A's.

`scale` is `ALPHA / rank` with `ALPHA = 32`, so that the best learning rate hardly depends on the rank. A is
initialized uniformly in ±1/sqrt(inputs) and B with zeros, so a new adapter changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from tinker_sync.local.engine.model import ModelConfig
from tinker_sync.local.engine.safetensors import Array

ALPHA = 32.0


@attrs.frozen(kw_only=True)
class LoraSettings:
    """The settings of an adapter: its rank, its seed, and the parts of the model that it adapts.

    Raises:
        ValueError: `rank` is below 1, or no part of the model is to be adapted.

    >>> LoraSettings(rank=8).scale
    4.0
    """

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __attrs_post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: must be at least 1, got {self.rank}")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("train_attn, train_mlp, train_unembed: at least one must be on")

    @property
    def scale(self) -> float:
        """The factor of the low-rank product."""
        return ALPHA / self.rank


class AdapterTarget(NamedTuple):
    """An adapted matrix, or several that share an input.

    Attributes:
        key: their common key in `LoraParams.pairs`.
        names: their names in Hugging Face files.
        inputs: the size of the shared input.
        outputs: the size of the output of each matrix.
    """

    key: str
    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]


def adapter_targets(config: ModelConfig, settings: LoraSettings) -> Iterator[AdapterTarget]:
    """Yield the adapted matrices, in the order of the flat array."""
    hidden, mlp, query, kv = config.hidden_size, config.mlp_size, config.query_size, config.kv_size
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        attn, feed = f"{layer}.self_attn", f"{layer}.mlp"
        if settings.train_attn:
            names = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
            yield AdapterTarget(f"{number}.qkv", names, hidden, (query, kv, kv))
            yield AdapterTarget(f"{number}.out", (f"{attn}.o_proj",), query, (hidden,))
        if settings.train_mlp:
            yield AdapterTarget(
                f"{number}.gate_up", (f"{feed}.gate_proj", f"{feed}.up_proj"), hidden, (mlp, mlp)
            )
            yield AdapterTarget(f"{number}.down", (f"{feed}.down_proj",), mlp, (hidden,))
    if settings.train_unembed:
        yield AdapterTarget("head", ("lm_head",), hidden, (config.vocab_size,))


class Pair(NamedTuple):
    """The numbers of an `AdapterTarget`: all A's in one array, and each matrix's output columns and its B."""

    a: Array
    bs: tuple[tuple[slice, Array], ...]


class LoraParams:
    """The matrices of an adapter, or their gradients, as views of one flat array. Not thread-safe.

    >>> size = {"vocab_size": 96, "hidden_size": 32, "layers": 1, "mlp_size": 48}
    >>> config = ModelConfig(heads=4, kv_heads=2, head_dim=8, **size)
    >>> params = LoraParams.start(config, LoraSettings(rank=4, train_mlp=False, train_unembed=False))
    >>> params.named()["model.layers.0.self_attn.k_proj.lora_B"].shape
    (16, 4)
    >>> len(params.flat)
    896
    """

    def __init__(self, config: ModelConfig, settings: LoraSettings, flat: Array) -> None:
        self.config = config
        self.settings = settings
        self.flat = flat
        self.pairs: dict[str, Pair] = {}
        self._named: dict[str, Array] = {}
        offset = 0
        for target in adapter_targets(config, settings):
            offset = self._place(target, offset)
        if flat.shape != (offset,):
            raise ValueError(f"flat: expected {offset} numbers, got shape {flat.shape}")

    def _place(self, target: AdapterTarget, offset: int) -> int:
        rank, column, bs = self.settings.rank, 0, []
        a_size = rank * len(target.names) * target.inputs
        a = self.flat[offset : offset + a_size].reshape(-1, target.inputs)
        offset += a_size
        for number, (name, size) in enumerate(zip(target.names, target.outputs, strict=True)):
            b = self.flat[offset : offset + size * rank].reshape(size, rank)
            bs.append((slice(column, column + size), b))
            self._named[f"{name}.lora_A"] = a[number * rank : (number + 1) * rank]
            self._named[f"{name}.lora_B"] = b
            column += size
            offset += size * rank
        self.pairs[target.key] = Pair(a, tuple(bs))
        return offset

    @classmethod
    def zeros(cls, config: ModelConfig, settings: LoraSettings, dtype: object = np.float32) -> LoraParams:
        """Return an adapter of zeros, for gradients or for numbers that the caller fills in.

        >>> size = {"vocab_size": 9, "hidden_size": 8, "layers": 1, "mlp_size": 8}
        >>> config = ModelConfig(heads=2, kv_heads=1, head_dim=4, **size)
        >>> float(LoraParams.zeros(config, LoraSettings(rank=2)).flat.sum())
        0.0
        """
        size = sum(
            settings.rank * (len(target.names) * target.inputs + sum(target.outputs))
            for target in adapter_targets(config, settings)
        )
        return cls(config, settings, np.zeros(size, dtype=np.dtype(dtype)))  # type: ignore[call-overload]

    @classmethod
    def start(cls, config: ModelConfig, settings: LoraSettings, dtype: object = np.float32) -> LoraParams:
        """Return a new adapter: equal for equal seeds, and without effect until trained.

        >>> size = {"vocab_size": 9, "hidden_size": 8, "layers": 1, "mlp_size": 8}
        >>> config = ModelConfig(heads=2, kv_heads=1, head_dim=4, **size)
        >>> one, two = (LoraParams.start(config, LoraSettings(rank=2, seed=seed)) for seed in (1, 2))
        >>> bool((one.flat == two.flat).all())
        False
        """
        params = cls.zeros(config, settings, dtype)
        rng = np.random.default_rng(settings.seed)
        for target in adapter_targets(config, settings):
            a = params.pairs[target.key].a
            bound = 1 / math.sqrt(target.inputs)
            a[...] = rng.uniform(-bound, bound, a.shape)
        return params

    def named(self) -> dict[str, Array]:
        """Return views by name: `<module>.lora_A` is `[rank, inputs]`, `...lora_B` is `[outputs, rank]`."""
        return dict(self._named)

    def snapshot(self) -> LoraParams:
        """Return a read-only copy for a sampler.

        Raises:
            ValueError: training has made some numbers infinite or NaN.
        """
        if not np.isfinite(self.flat).all():
            raise ValueError("adapter: not all of its numbers are finite; the learning rate may be too high")
        flat = self.flat.copy()
        flat.setflags(write=False)
        return LoraParams(self.config, self.settings, flat)


class AdapterRoute(NamedTuple):
    """The rows of a batch that use an adapter.

    `params` None means the base model without an adapter, and `rows` None means all rows.
    """

    params: LoraParams | None
    rows: Array | None = None


def apply_adapter(x: Array, weight: Array, routes: Sequence[AdapterRoute], key: str) -> Array:
    """Return `x @ weight.T`, plus for each row the low-rank product of its adapter for the matrix `key`."""
    y: Array = x @ weight.T
    for route in routes:
        pair = route.params.pairs.get(key) if route.params is not None else None
        if pair is not None and route.params is not None:
            _add_low_rank(y, x, pair, route.params.settings, route.rows)
    return y


def _add_low_rank(y: Array, x: Array, pair: Pair, settings: LoraSettings, rows: Array | None) -> None:
    if rows is None:
        low = _project_down(x, pair, settings)
        for number, (columns, b) in enumerate(pair.bs):
            y[:, columns] += _part(low, number, settings.rank) @ b.T
        return
    low = _project_down(x[rows], pair, settings)
    for number, (columns, b) in enumerate(pair.bs):
        y[rows, columns] += _part(low, number, settings.rank) @ b.T


def _project_down(x: Array, pair: Pair, settings: LoraSettings) -> Array:
    low: Array = x @ pair.a.T
    low *= settings.scale
    return low


def _part(low: Array, number: int, rank: int) -> Array:
    return low[:, number * rank : (number + 1) * rank]


def apply_adapter_backward(
    dy: Array,
    x: Array,
    weight: Array,
    params: LoraParams,
    grads: LoraParams,
    key: str,
    *,
    want_dx: bool = True,
) -> Array | None:
    """Add the adapter's gradients, from `dy`, to `grads`. Return the gradient of `x` if `want_dx` is set."""
    dx: Array | None = dy @ weight if want_dx else None
    pair = params.pairs.get(key)
    if pair is None:
        return dx
    into, rank = grads.pairs[key], params.settings.rank
    low = _project_down(x, pair, params.settings)
    dlow = np.empty_like(low)
    for number, ((columns, b), (_, db)) in enumerate(zip(pair.bs, into.bs, strict=True)):
        np.add(db, dy[:, columns].T @ _part(low, number, rank), out=db)
        np.matmul(dy[:, columns], b, out=_part(dlow, number, rank))
    dlow *= params.settings.scale
    into.a[...] += dlow.T @ x
    if dx is not None:
        dx += dlow @ pair.a
    return dx
