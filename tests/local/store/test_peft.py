"""Stored adapters follow the layout of the PEFT library, except for the name of the head's weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.engine_models import busy_params, tiny_weights

from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.model import read_safetensors
from tinker_sync.local.store import Store
from tinker_sync.local.store.peft import config


def test_a_stored_adapter_has_the_layout_of_peft(tmp_path: Path) -> None:
    """The tensors of the files, with the scale that PEFT computes, give the same product as the engine."""
    weights = tiny_weights()
    params = busy_params(weights, LoraSettings(rank=4))
    with Store(tmp_path) as store:
        store.add_session("s-1")
        store.add_run(
            "r-1", session_id="s-1", model_seq_id=0, base_model="org/base", lora=LoraSettings(rank=4)
        )
        store.save_checkpoint("r-1", "sampler", "x", params.named(), {})
        files = store.checkpoint_files("r-1", "sampler", "x")
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    tree = json.loads(files["adapter_config.json"].path.read_bytes())
    tensors = read_safetensors(files["adapter_model.safetensors"].path)
    assert tree["base_model_name_or_path"] == "org/base"
    assert (tree["peft_type"], tree["task_type"], tree["r"]) == ("LORA", "CAUSAL_LM", 4)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert set(tree["target_modules"]) == names
    assert len(tensors) == 2 * (2 * 7 + 1)
    assert [name for name in tensors if ".layers." not in name] == [
        f"base_model.model.model.unembed_tokens.{part}.weight" for part in ("lora_A", "lora_B")
    ]
    module = "base_model.model.model.layers.1.self_attn.k_proj"
    a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
    x = np.random.default_rng(0).standard_normal((3, weights.config.hidden_size)).astype(np.float32)
    pair = params.pairs["1.qkv"]
    ours = params.settings.scale * (x @ pair.a[4:8].T) @ pair.bs[1][1].T
    np.testing.assert_allclose(tree["lora_alpha"] / tree["r"] * (x @ a.T) @ b.T, ours, rtol=1e-5)


def test_halves_and_mixed_ranks_are_refused() -> None:
    half = {"x.lora_A": np.zeros((4, 8))}
    with pytest.raises(ValueError, match="not one adapter"):
        config(half, "org/base")
    with pytest.raises(ValueError, match=r"ranks \[2, 4\]"):
        config({**half, "x.lora_B": np.zeros((8, 2))}, "org/base")
    with pytest.raises(ValueError, match="0 modules"):
        config({}, "org/base")
