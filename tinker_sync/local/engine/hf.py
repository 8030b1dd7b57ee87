"""Base models from Hugging Face directories: `config.json` and safetensors files, Qwen3 and Llama 3 layouts.

No other module of the engine reads files. For a model that the engine cannot compute exactly, this module
raises a ValueError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tinker_sync.local.engine import safetensors
from tinker_sync.local.engine._arrays import Array
from tinker_sync.local.engine.model import ModelConfig, RopeScaling, Weights, make_layer


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
