"""Tiny random models and data for tests of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.engine.losses import Example
from tinker_sync.local.engine.model import ModelConfig, RopeScaling, Weights, random_weights
from tinker_sync.local.engine.training import AdapterTrainer

VOCAB = 23

QWEN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "mlp_size": 20,
}
LLAMA = QWEN | {
    "qk_norm": False,
    "tied": False,
    "rope_theta": 500.0,
    "rope_scaling": RopeScaling(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    ),
}
SHAPES = {"qwen": QWEN, "llama": LLAMA}

LOSS_CONFIGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
    "stable_reinforce": {},
}


def tiny_weights(
    shape: str = "qwen", *, seed: int = 1, dtype: str = "float32", scale: float = 0.3
) -> Weights:
    """Make a base model whose distributions are far from uniform, so that mistakes change the results."""
    return random_weights(ModelConfig(**SHAPES[shape]), seed=seed, dtype=dtype, scale=scale)


def busy_params(weights: Weights, settings: LoraSettings, *, seed: int = 3) -> LoraParams:
    """Make an adapter whose matrices are all random, also B, which is zero in a new adapter."""
    params = LoraParams.zeros(weights.config, settings, weights.dtype)
    params.flat[:] = np.random.default_rng(seed).standard_normal(len(params.flat)) * 0.2
    return params


def busy_run(weights: Weights, settings: LoraSettings | None = None, *, seed: int = 3) -> AdapterTrainer:
    """Make a trainer in which every parameter has a gradient."""
    settings = settings or LoraSettings(rank=3)
    run = AdapterTrainer(weights, settings)
    run.params.flat[:] = busy_params(weights, settings, seed=seed).flat
    return run


def example(rng: np.random.Generator, length: int, loss_fn: str, vocab: int = VOCAB) -> Example:
    """Make a datum with the inputs of a loss. A loss with clipping clips some of its ratios, but not all."""
    tokens = rng.integers(0, vocab, length + 1)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss_fn == "cross_entropy":
        inputs["weights"] = rng.random(length).astype(np.float32)
        inputs["weights"][: length // 3] = 0
    else:
        inputs["logprobs"] = (-np.log(vocab) + rng.standard_normal(length)).astype(np.float32)
        inputs["advantages"] = rng.standard_normal(length).astype(np.float32)
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = (np.arange(length) >= length // 3).astype(np.float32)
    return Example(tokens[:-1], inputs)


def examples(loss_fn: str, lengths: tuple[int, ...] = (5, 9, 5, 17), *, seed: int = 0) -> list[Example]:
    """Make data for a loss, one datum of each length."""
    rng = np.random.default_rng(seed)
    return [example(rng, length, loss_fn) for length in lengths]
