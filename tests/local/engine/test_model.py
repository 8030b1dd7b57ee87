"""Base models and arrays are read from valid files, damaged files are refused, and positions are rotated."""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine_models import LLAMA, QWEN, examples, tiny_weights

from tinker_sync.local.engine.decoder import (
    frequencies,
    rotate,
    rotation,
)
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.model import (
    ModelConfig,
    RopeScaling,
    Weights,
    load_config,
    load_weights,
    read_safetensors,
)
from tinker_sync.local.engine.safetensors import pieces, read
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


DTYPES = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"]


def encoded(arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> bytearray:
    return bytearray(b"".join(pieces(arrays, metadata)))


@st.composite
def some_arrays(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.text(min_size=1, max_size=5).filter(_encodes), unique=True, max_size=4))
    made = {}
    for name in names:
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = int(np.prod(shape)) * dtype.itemsize
        content = draw(st.binary(min_size=size, max_size=size))
        made[name] = (
            np.frombuffer(content, "u1").view(dtype).reshape(shape) if size else np.empty(shape, dtype)
        )
        if dtype.kind == "b":
            made[name] = made[name].view("u1").__gt__(127) if size else made[name]
    return made


def _encodes(name: str) -> bool:
    return name != "__metadata__" and not any("\ud800" <= character <= "\udfff" for character in name)


@given(some_arrays())
def test_arrays_keep_every_bit(arrays: dict[str, Any]) -> None:
    back = read(encoded(arrays))
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()


def test_non_contiguous_arrays_are_written_in_order() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    odd = {"columns": base[:, ::2], "turned": base.T, "back": base[::-1], "big": base.astype(">f4")}
    back = read(encoded(odd))
    for name, array in odd.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == np.dtype("<f4")


def test_the_safetensors_library_agrees(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.float32([1.5, float("nan")])}
    arrays["flags"], arrays["none"] = np.array([True, False]), np.zeros((0, 3), np.float16)
    theirs = library.load(bytes(encoded(arrays, {"format": "pt"})))
    ours = read(library.save(arrays))
    for name, array in arrays.items():
        for back in (theirs[name], ours[name]):
            assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    "array", [np.zeros(2, "c8"), np.array(["a"]), np.array([object()]), np.zeros(1, "M8[s]")]
)
def test_types_that_the_format_lacks_are_refused(array: Any) -> None:
    with pytest.raises(ValueError, match="x: cannot be written"):
        encoded({"x": array})


@given(st.data())
def test_damage_raises_value_error_or_changes_numbers_only(data: st.DataObject) -> None:
    content = encoded({"a": np.arange(4, dtype=np.int32), "b": np.ones((2, 2))})
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    content = content[:cut] if data.draw(st.booleans()) else content
    with suppress(ValueError):
        read(content)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            {"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}},
            "holds F8_E4M3, which is not one of",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "4 bytes for shape"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "impossible"),
        ({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, "beyond the end"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "damaged"),
        ({"a": 3}, "damaged"),
        ([], "damaged"),
    ],
)
def test_the_error_names_the_fault_in_the_header(header: Any, words: str) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=words):
        read(struct.pack("<Q", len(text)) + text + bytes(16))


ROTATED = ModelConfig(
    vocab_size=9, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=16, mlp_size=8, rope_theta=10000.0
)
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=256)


def test_frequencies_are_powers_of_theta() -> None:
    np.testing.assert_allclose(frequencies(ROTATED), [10000.0 ** (-i / 8) for i in range(8)], rtol=1e-6)


def test_llama_3_scales_low_frequencies() -> None:
    plain, scaled = frequencies(ROTATED), frequencies(attrs.evolve(ROTATED, rope_scaling=SCALED))
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        turns = 256 * before / (2 * math.pi)
        if turns >= 4:
            assert after == pytest.approx(before)
        elif turns <= 1:
            assert after == pytest.approx(before / 8)
        else:
            share = (turns - 1) / 3
            assert after == pytest.approx(share * before + (1 - share) * before / 8)
    ratios = (scaled / plain).round(4).tolist()
    assert ratios[0] == 1.0
    assert ratios[-1] == 0.125
    assert any(0.125 < ratio < 1 for ratio in ratios)


def test_rotated_products_depend_on_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 16))

    def product(at: int, other: int) -> float:
        turns = [rotation(ROTATED, np.array([place]), np.dtype(np.float64)) for place in (at, other)]
        return float((rotate(q, turns[0]) * rotate(k, turns[1])).sum())

    assert product(5, 3) == pytest.approx(product(105, 103), abs=1e-4)
    assert product(5, 3) != pytest.approx(product(5, 4), abs=1e-2)
    turn = rotation(ROTATED, np.array([77]), np.dtype(np.float64))
    np.testing.assert_allclose(rotate(rotate(q, turn), turn, back=True), q, rtol=1e-12)
