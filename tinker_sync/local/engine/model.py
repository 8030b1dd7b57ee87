"""The shape of a decoder (`ModelConfig`) and its frozen base weights (`Weights`).

Matrices have the layout of Hugging Face files, one row for each output. Matrices with the same input are
joined into one: query, key and value; gate and up. Weights are read-only, so all trainers and samplers share
them.

`load_weights` reads Hugging Face directories: `config.json` and safetensors files, Qwen3 and Llama 3 layouts.
For a model that the engine cannot compute exactly, it raises a ValueError that names the file. No other
module of the engine reads files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from tinker_sync.local.engine import safetensors
from tinker_sync.local.engine.safetensors import Array


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


# ---------------------------------------------------------------------------------- Hugging Face directories


def load_config(directory: str | Path) -> ModelConfig:
    """Return the shape of the model in a directory.

    Raises:
        ValueError: the file is damaged, or the engine does not compute this kind of model.
        OSError: the file is missing.
    """
    path = Path(directory) / "config.json"
    tree = _read_json(path)
    try:
        return _config(tree)
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path}: {problem!r}") from problem
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must hold an object")  # noqa: TRY004  # damage in a file
    return tree


def _config(tree: Mapping[str, Any]) -> ModelConfig:
    kind = tree.get("model_type")
    if kind not in ("qwen3", "llama"):
        raise ValueError(f"model_type {kind!r} is neither qwen3 nor llama")
    if tree.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {tree['hidden_act']!r} is not silu")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if tree.get(name):
            raise ValueError(f"{name} is not supported")
    heads = int(tree["num_attention_heads"])
    if heads < 1:
        raise ValueError(f"num_attention_heads is {heads}; expected 1 or more")
    # Newer files keep all settings of the rotation in `rope_parameters`.
    rope = dict(tree.get("rope_scaling") or {}) | dict(tree.get("rope_parameters") or {})
    theta = rope.get("rope_theta") or tree.get("rope_theta") or 10000.0
    return ModelConfig(
        vocab_size=int(tree["vocab_size"]),
        hidden_size=int(tree["hidden_size"]),
        layers=int(tree["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(tree.get("num_key_value_heads") or heads),
        head_dim=int(tree.get("head_dim") or int(tree["hidden_size"]) // heads),
        mlp_size=int(tree["intermediate_size"]),
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope),
        norm_eps=float(tree.get("rms_norm_eps", 1e-6)),
        qk_norm=kind == "qwen3",
        tied=bool(tree.get("tie_word_embeddings", False)),
        max_positions=int(tree.get("max_position_embeddings", 32768)),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is neither default nor llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


def read_safetensors(path: str | Path) -> dict[str, Array]:
    """Return every tensor of a file as float32; float64 stays float64.

    Raises:
        ValueError: the file is damaged, or holds a type that the engine does not compute with.
        OSError: the file is missing or cannot be read.
    """
    try:
        found = safetensors.read(np.memmap(path, np.uint8, mode="r").data)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    for name, array in found.items():
        if array.dtype.kind != "f":
            raise ValueError(f"{path}: {name} holds {array.dtype}, expected floats")
        found[name] = array.astype(np.float64 if array.dtype.itemsize == 8 else np.float32)
    return found


def load_weights(directory: str | Path) -> Weights:
    """Return the base model in a directory, in float32.

    Raises:
        ValueError: a file is damaged, a tensor is missing or has the wrong shape, or the engine does not
            compute this kind of model.
        OSError: a file is missing.
    """
    directory = Path(directory)
    config = load_config(directory)
    tensors: dict[str, Array] = {}
    for path in _files(directory):
        tensors |= read_safetensors(path)
    try:
        return _weights(config, tensors)
    except KeyError as problem:
        raise ValueError(f"{directory}: there is no tensor {problem}") from problem
    except ValueError as problem:
        raise ValueError(f"{directory}: {problem}") from problem


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{index}: has no weight_map")  # noqa: TRY004  # damage in a file
    files = sorted({str(name) for name in names.values()})
    for name in files:
        if Path(name).name != name or name == "..":
            raise ValueError(f"{index}: {name!r} is not the name of a file beside it")
    return [directory / name for name in files]


def _weights(config: ModelConfig, tensors: Mapping[str, Array]) -> Weights:
    def one(name: str) -> Array:
        return tensors[name].astype(np.float32, copy=False)

    def join(*names: str) -> Array:
        return np.concatenate([one(name) for name in names])

    layers = []
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        attn, feed = f"{layer}.self_attn", f"{layer}.mlp"
        arrays = {
            "attn_norm": one(f"{layer}.input_layernorm.weight"),
            "qkv": join(*(f"{attn}.{part}_proj.weight" for part in "qkv")),
            "out": one(f"{attn}.o_proj.weight"),
            "mlp_norm": one(f"{layer}.post_attention_layernorm.weight"),
            "gate_up": join(f"{feed}.gate_proj.weight", f"{feed}.up_proj.weight"),
            "down": one(f"{feed}.down_proj.weight"),
        }
        if config.qk_norm:
            arrays |= {f"{part}_norm": one(f"{attn}.{part}_norm.weight") for part in "qk"}
        layers.append(make_layer(arrays))
    embedding = one("model.embed_tokens.weight")
    return Weights(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=one("model.norm.weight"),
        head=embedding if config.tied else one("lm_head.weight"),
    )
