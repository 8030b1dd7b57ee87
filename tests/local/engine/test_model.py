"""Base models are read from valid files, and damaged files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_models import LLAMA, QWEN, examples, tiny_weights

from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.model import Weights, load_config, load_weights, read_safetensors
from tinker_sync.local.engine.training import AdapterTrainer

CONFIG: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "hidden_act": "silu",
}
QWEN_CONFIG = CONFIG | {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 10000.0}
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA_CONFIG = CONFIG | {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": SCALING}


def split(weights: Weights) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights as the separate tensors of a file, by their names there."""
    config = weights.config
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.tied:
        tensors["lm_head.weight"] = weights.head
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}"
        cuts = [config.query_size, config.query_size + config.kv_size]
        for part, array in zip("qkv", np.split(layer.qkv, cuts), strict=True):
            tensors[f"{prefix}.self_attn.{part}_proj.weight"] = array
        for part, array in zip(("gate", "up"), np.split(layer.gate_up, 2), strict=True):
            tensors[f"{prefix}.mlp.{part}_proj.weight"] = array
        tensors[f"{prefix}.self_attn.o_proj.weight"] = layer.out
        tensors[f"{prefix}.mlp.down_proj.weight"] = layer.down
        tensors[f"{prefix}.input_layernorm.weight"] = layer.attn_norm
        tensors[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        if layer.q_norm is not None and layer.k_norm is not None:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
            tensors[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
    return tensors


def packed(tensors: dict[str, np.ndarray[Any, Any]], dtype: str = "F32") -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in tensors.items():
        if dtype == "BF16":
            data = (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            data = array.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1"}[dtype]).tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def written(folder: Path, shape: str, config: dict[str, Any]) -> Weights:
    weights = tiny_weights(shape)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(packed(split(weights)))
    return weights


@pytest.mark.parametrize(("shape", "config"), [("qwen", QWEN_CONFIG), ("llama", LLAMA_CONFIG)])
def test_a_written_model_is_read_back(tmp_path: Path, shape: str, config: dict[str, Any]) -> None:
    weights = written(tmp_path, shape, config)
    loaded = load_weights(tmp_path)
    assert loaded.config == weights.config
    assert (loaded.head is loaded.embedding) == (shape == "qwen")
    for one, two in zip(loaded.arrays(), weights.arrays(), strict=True):
        assert one.dtype == np.float32
        assert one.tobytes() == two.tobytes()
    data = examples("cross_entropy")
    one, two = (
        AdapterTrainer(base, LoraSettings(rank=1)).forward(data, "cross_entropy")
        for base in (weights, loaded)
    )
    assert one.metrics == two.metrics


def test_newer_rotation_settings_are_read(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA_CONFIG.items() if not name.startswith("rope")}
    config["rope_parameters"] = SCALING | {"rope_theta": 500.0}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = load_config(tmp_path)
    assert loaded.rope_scaling == LLAMA["rope_scaling"]
    assert loaded.rope_theta == LLAMA["rope_theta"]
    assert not loaded.qk_norm


def test_missing_config_fields_have_defaults(tmp_path: Path) -> None:
    gone = ("head_dim", "num_key_value_heads", "rope_theta", "hidden_act")
    config = {name: value for name, value in QWEN_CONFIG.items() if name not in gone}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = load_config(tmp_path)
    assert (loaded.head_dim, loaded.kv_heads, loaded.rope_theta) == (4, 4, QWEN.get("rope_theta", 10000.0))


def test_sharded_files_are_read(tmp_path: Path) -> None:
    weights = written(tmp_path, "qwen", QWEN_CONFIG)
    tensors = split(weights)
    (tmp_path / "model.safetensors").unlink()
    names = {}
    for number, chosen in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        (tmp_path / file).write_bytes(packed({name: tensors[name] for name in chosen}))
        names |= dict.fromkeys(chosen, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    assert load_weights(tmp_path).embedding.tobytes() == weights.embedding.tobytes()
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}), encoding="utf-8")
    with pytest.raises(ValueError, match="is not the name of a file beside it"):
        load_weights(tmp_path)


@pytest.mark.parametrize(("dtype", "tolerance"), [("BF16", 2**-7), ("F16", 2**-10), ("F64", 0.0)])
def test_other_number_types_are_converted(tmp_path: Path, dtype: str, tolerance: float) -> None:
    array = np.array([[1.0, -0.1], [300.0, 0.0]], dtype=np.float32)
    (tmp_path / "a").write_bytes(packed({"x": array}, dtype))
    found = read_safetensors(tmp_path / "a")["x"]
    assert found.dtype == (np.float64 if dtype == "F64" else np.float32)
    np.testing.assert_allclose(found, array, rtol=tolerance)
    assert found[0, 0] == 1.0


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "empty"),
        (struct.pack("<Q", 1 << 62), "the header claims"),
        (struct.pack("<Q", 4) + b"[1,2", "Expecting"),
        (struct.pack("<Q", 2) + b"[]", "header is damaged"),
        (packed({"x": np.ones(3)})[:-1], "x has 12 bytes for shape .*, or lies beyond the end"),
        (packed({"x": np.ones(3)}).replace(b"[3]", b"[4]"), "x has 12 bytes for shape"),
        (packed({"x": np.ones(3)}).replace(b"[0, 12]", b"[9, 12]"), "x has 3 bytes for shape"),
        (packed({"x": np.ones(3)}, "I8"), "x holds int8, expected floats"),
    ],
)
def test_the_error_names_the_damaged_file(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"bad\.safetensors: .*{complaint}"):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mistral"}, "'mistral' is neither qwen3 nor llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"num_attention_heads": None}, "TypeError"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "kv_heads: 4 heads do not divide among 3"),
        ({"head_dim": 5}, "head_dim: must be even"),
        ({"vocab_size": 0}, "vocab_size: must be positive"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_CONFIG | change), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"config\.json: .*{complaint}"):
        load_config(tmp_path)


def test_the_error_names_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    weights = written(tmp_path, "qwen", QWEN_CONFIG)
    tensors = split(weights)
    del tensors["model.norm.weight"]
    (tmp_path / "model.safetensors").write_bytes(packed(tensors))
    with pytest.raises(ValueError, match=r"there is no tensor 'model\.norm\.weight'"):
        load_weights(tmp_path)
    tensors["model.norm.weight"] = np.ones(15)
    (tmp_path / "model.safetensors").write_bytes(packed(tensors))
    with pytest.raises(ValueError, match=r"final_norm: expected shape \(16,\), got \(15,\)"):
        load_weights(tmp_path)
