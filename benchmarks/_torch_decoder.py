"""The engine's architecture in PyTorch eager, for `bench_engine.py`, as fast as plain code for one CPU gets.

It uses fused attention (scaled_dot_product_attention), joined weights like the engine, and a preallocated
cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

from tinker_sync.local.engine.lora import LoraParams
from tinker_sync.local.engine.model import Layer, Weights

POSITIONS = 1024


def _tensor(array: Any) -> Any:
    return torch.tensor(np.array(array))


class TorchDecoder:
    """A base model with one adapter that can be trained."""

    def __init__(self, weights: Weights, params: LoraParams) -> None:
        self.config = weights.config
        self.rank, self.scale = params.settings.rank, params.settings.scale
        self.layers = [self._layer(layer) for layer in weights.layers]
        self.embedding, self.final_norm = _tensor(weights.embedding), _tensor(weights.final_norm)
        self.pairs = {
            key: [torch.nn.Parameter(_tensor(array)) for array in (pair.a, *(b for _, b in pair.bs))]
            for key, pair in params.pairs.items()
        }
        dim = self.config.head_dim
        frequency = 1.0 / self.config.rope_theta ** (torch.arange(0, dim, 2) / dim)
        angles = torch.arange(POSITIONS)[:, None] * frequency
        self.cosine, self.sine = angles.cos(), angles.sin()

    @staticmethod
    def _layer(layer: Layer) -> dict[str, Any]:
        names = ("attn_norm", "qkv", "q_norm", "k_norm", "out", "mlp_norm", "gate_up", "down")
        return {name: _tensor(getattr(layer, name)) for name in names}

    def parameters(self) -> list[Any]:
        return [parameter for pair in self.pairs.values() for parameter in pair]

    def linear(self, x: Any, weight: Any, key: str) -> Any:
        a, *bs = self.pairs[key]
        lows = (F.linear(x, a) * self.scale).split(self.rank, dim=-1)
        parts = [F.linear(low, b) for low, b in zip(lows, bs, strict=True)]
        return F.linear(x, weight) + (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))

    def norm(self, x: Any, weight: Any) -> Any:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def rotated(self, x: Any, start: int) -> Any:
        end = start + x.shape[2]
        cos, sin = self.cosine[start:end], self.sine[start:end]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def new_cache(self, rows: int, length: int) -> list[tuple[Any, Any]]:
        shape = (rows, self.config.kv_heads, length, self.config.head_dim)
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]

    def attention(self, number: int, x: Any, cache: Any, start: int) -> Any:
        config, layer, (rows, length, _) = self.config, self.layers[number], x.shape
        qkv = self.linear(self.norm(x, layer["attn_norm"]), layer["qkv"], f"{number}.qkv")
        q, k, v = (
            part.reshape(rows, length, -1, config.head_dim)
            for part in qkv.split([config.query_size, config.kv_size, config.kv_size], dim=-1)
        )
        q = self.rotated(self.norm(q, layer["q_norm"]).transpose(1, 2), start)
        k = self.rotated(self.norm(k, layer["k_norm"]).transpose(1, 2), start)
        v = v.transpose(1, 2)
        if cache is not None:
            (keys, values), now, seen = cache[number], slice(start, start + length), slice(0, start + length)
            keys[:, :, now], values[:, :, now] = k, v
            k, v = keys[:, :, seen], values[:, :, seen]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        return self.linear(mixed.transpose(1, 2).flatten(2), layer["out"], f"{number}.out")

    def hidden(self, tokens: Any, cache: Any = None, start: int = 0) -> Any:
        x = F.embedding(tokens, self.embedding)
        for number, layer in enumerate(self.layers):
            x = x + self.attention(number, x, cache, start)
            joined = self.linear(self.norm(x, layer["mlp_norm"]), layer["gate_up"], f"{number}.gate_up")
            gate, up = joined.chunk(2, dim=-1)
            x = x + self.linear(F.silu(gate) * up, layer["down"], f"{number}.down")
        return self.norm(x, self.final_norm)

    def logits(self, hidden: Any) -> Any:
        return self.linear(hidden, self.embedding, "head")

    @torch.no_grad()
    def logprobs(self, tokens: Any, targets: Any) -> Any:
        """Return the log-probabilities of the targets of one sequence."""
        rows = F.log_softmax(self.logits(self.hidden(torch.tensor(tokens)[None])), dim=-1)[0]
        return rows.gather(1, torch.tensor(targets)[:, None])[:, 0].numpy()

    @torch.no_grad()
    def sample(self, prompts: Any, count: int) -> None:
        """Sample `count` tokens after each of several equally long prompts."""
        rows, start = prompts.shape
        cache = self.new_cache(rows, start + count)
        state = self.hidden(prompts, cache)
        for number in range(count):
            logprobs = F.log_softmax(self.logits(state[:, -1]), dim=-1)
            chosen = torch.multinomial(logprobs.exp(), 1)
            logprobs.gather(1, chosen).tolist()
            if number < count - 1:
                state = self.hidden(chosen, cache, start + number)


class TorchTraining:
    """Training steps of AdamW with cross-entropy on equally long sequences, `rows` of them at once."""

    def __init__(
        self, model: TorchDecoder, tokens: Any, targets: Any, rows: int, learning_rate: float
    ) -> None:
        self.model, self.rows = model, rows
        self.tokens, self.targets = torch.tensor(tokens), torch.tensor(targets)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, fused=True
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        for tokens, targets in zip(self.tokens.split(self.rows), self.targets.split(self.rows), strict=True):
            logits = self.model.logits(self.model.hidden(tokens))
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
        self.optimizer.step()
