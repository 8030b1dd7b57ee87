"""The shape of a decoder (`ModelConfig`) and its frozen base weights (`Weights`).

Matrices have the layout of Hugging Face files, one row for each output. Matrices with the same input are
joined into one: query, key and value; gate and up. Weights are read-only, so all trainers and samplers share
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from tinker_sync.local.engine._arrays import Array


@attrs.frozen(kw_only=True)
class RopeScaling:
    """The parameters by which Llama 3 extends the rotary embedding beyond its first training length."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The sizes and settings of a decoder: of a Qwen3 model with `qk_norm`, of a Llama 3 model without.

    Raises:
        ValueError: a size is not positive, or the sizes do not fit each other.

    >>> size = {"vocab_size": 96, "hidden_size": 32, "layers": 2, "mlp_size": 48}
    >>> config = ModelConfig(heads=4, kv_heads=2, head_dim=8, **size)
    >>> config.query_size, config.kv_size
    (32, 16)
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tied: bool = True
    max_positions: int = 32768

    def __attrs_post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "mlp_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: must be positive, got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.heads} heads do not divide among {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: must be even to be rotated, got {self.head_dim}")

    @property
    def query_size(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The width of all key heads together. All value heads together have the same width."""
        return self.kv_heads * self.head_dim


@attrs.frozen(eq=False, kw_only=True)
class Layer:
    """The weights of one layer. `qkv` and `gate_up` have the rows of several matrices."""

    attn_norm: Array
    qkv: Array
    q_norm: Array | None
    k_norm: Array | None
    out: Array
    mlp_norm: Array
    gate_up: Array
    down: Array


@attrs.frozen(eq=False, kw_only=True)
class Weights:
    """The read-only weights of a base model. `head` is the array `embedding` if the model ties the two.

    >>> size = {"vocab_size": 96, "hidden_size": 32, "layers": 2, "mlp_size": 48}
    >>> config = ModelConfig(heads=4, kv_heads=2, head_dim=8, **size)
    >>> weights = random_weights(config, seed=0)
    >>> weights.head is weights.embedding, weights.embedding.flags.writeable, weights.count
    (True, False, 18624)
    """

    config: ModelConfig
    embedding: Array
    layers: tuple[Layer, ...]
    final_norm: Array
    head: Array

    def __attrs_post_init__(self) -> None:
        _check_shapes(self)
        for array in self.arrays():
            array.setflags(write=False)

    def arrays(self) -> list[Array]:
        """Return all arrays of the model; a head that is the embedding is not repeated."""
        found = [self.embedding, self.final_norm]
        if self.head is not self.embedding:
            found.append(self.head)
        for layer in self.layers:
            found += [array for array in attrs.astuple(layer, recurse=False) if array is not None]
        return found

    @property
    def count(self) -> int:
        """The number of parameters."""
        return sum(array.size for array in self.arrays())

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """The type of the arrays: float32, or float64 for checks of gradients."""
        return self.embedding.dtype


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each field of a `Layer`, by name, in a model with this config."""
    hidden, head_dim = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "qkv": (config.query_size + 2 * config.kv_size, hidden),
        "out": (hidden, config.query_size),
        "mlp_norm": (hidden,),
        "gate_up": (2 * config.mlp_size, hidden),
        "down": (hidden, config.mlp_size),
    }
    return shapes | ({"q_norm": (head_dim,), "k_norm": (head_dim,)} if config.qk_norm else {})


def _check_shapes(weights: Weights) -> None:
    config = weights.config
    vocab = (config.vocab_size, config.hidden_size)
    want: list[tuple[str, Array | None, tuple[int, ...] | None]] = [
        ("embedding", weights.embedding, vocab),
        ("head", weights.head, vocab),
        ("final_norm", weights.final_norm, (config.hidden_size,)),
    ]
    shapes = layer_shapes(config)
    for number, layer in enumerate(weights.layers):
        fields = attrs.fields_dict(Layer)
        want += [(f"layers[{number}].{name}", getattr(layer, name), shapes.get(name)) for name in fields]
    for name, array, shape in want:
        got = None if array is None else array.shape
        if got != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {got}")
    if len(weights.layers) != config.layers:
        raise ValueError(f"layers: expected {config.layers}, got {len(weights.layers)}")


def make_layer(arrays: Mapping[str, Array]) -> Layer:
    """Make a layer of arrays that are named like its fields; `q_norm` and `k_norm` may be missing."""
    return Layer(**{"q_norm": None, "k_norm": None, **arrays})  # type: ignore[arg-type]  # by name


def random_weights(config: ModelConfig, *, seed: int, scale: float = 0.02, dtype: str = "float32") -> Weights:
    """Return random weights: matrices are normal with standard deviation `scale`, and norms are one.

    >>> size = {"vocab_size": 96, "hidden_size": 32, "layers": 1, "mlp_size": 48}
    >>> config = ModelConfig(heads=4, kv_heads=2, head_dim=8, **size)
    >>> float(random_weights(config, seed=1).layers[0].attn_norm.mean())
    1.0
    """
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        if name.endswith("norm"):
            return np.ones(shape, dtype=dtype)
        return (rng.standard_normal(shape) * scale).astype(dtype)

    vocab = (config.vocab_size, config.hidden_size)
    embedding = draw("embedding", vocab)
    shapes = layer_shapes(config)
    layers = tuple(
        make_layer({name: draw(name, shape) for name, shape in shapes.items()}) for _ in range(config.layers)
    )
    return Weights(
        config=config,
        embedding=embedding,
        layers=layers,
        final_norm=draw("final_norm", (config.hidden_size,)),
        head=embedding if config.tied else draw("head", vocab),
    )
