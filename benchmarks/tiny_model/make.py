"""Make the built-in model: tokenizer, weights and loss curve. Needs torch.

    OMP_NUM_THREADS=1 python -m benchmarks.tiny_model.make FOLDER

The same seeds and the same versions of torch and tokenizers give the same files; other versions round
differently and give a model as good. One thread of an ordinary processor takes about half an hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.tiny_model.corpus import documents
from benchmarks.tiny_model.page import END_OF_TEXT, END_OF_TURN, TURN, Page

SPECIAL: Final = (END_OF_TEXT, TURN, END_OF_TURN)
"""Tokens 0, 1 and 2."""
VOCAB: Final = 512
HIDDEN: Final = 128
LAYERS: Final = 4
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 32
MLP: Final = 384
ROPE_THETA: Final = 10000.0
NORM_EPS: Final = 1e-6
MAX_POSITIONS: Final = 4096

STEPS: Final = 5000
ROWS: Final = 32
"""Sequences in a step; each starts with a document and holds as many documents as fit."""
LENGTH: Final = 128
WARMUP: Final = 100
COOLDOWN: Final = 0.5
"""The share of the steps, at the end, over which the rate falls to zero."""
RATE: Final = 1e-2
RANDOM_WEIGHT: Final = 0.1
"""The weight of a token drawn at random; above zero, so that the model can also write problems itself."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Array = npt.NDArray[Any]

# ------------------------------------------------------------------------------------------------- tokenizer


def make_tokenizer(path: Path) -> None:
    """Train a byte-level BPE tokenizer on the corpus; digits stay single, and every text has an encoding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Leave out the special tokens: they are not split into pairs.
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    pages = itertools.islice(documents(seed=1), 20_000)
    tokenizer.train_from_iterator((text for page in pages for text in special.split(page.text)), trainer)
    tree = json.loads(tokenizer.to_str())
    # Older versions of tokenizers read merges as strings only; newer ones read both forms.
    tree["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in tree["model"]["merges"]
    ]
    path.write_text(json.dumps(tree, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def tokenizer_config() -> dict[str, Any]:
    """Return the settings that transformers reads beside the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for number, token in enumerate(SPECIAL)
        },
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }


def model_config() -> dict[str, Any]:
    """Return the shape of the model in Hugging Face's terms."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "torch_dtype": "float16",
    }


# ------------------------------------------------------------------------------------------------------ data


def _encode(tokenizer: Any, page: Page) -> tuple[list[int], list[float]]:
    """Return the tokens of a document with its end token, and the weight of each."""
    encoding = tokenizer.encode(page.text)
    weights = [
        RANDOM_WEIGHT if any(start < end and first < last for first, end in page.random_spans) else 1.0
        for start, last in encoding.offsets
    ]
    return [*encoding.ids, 0], [*weights, 1.0]


def rows(tokenizer: Any, seed: int) -> Iterator[tuple[list[int], list[float]]]:
    """Yield rows of `LENGTH + 1` tokens: whole documents, the last one cut off."""
    tokens: list[int] = []
    weights: list[float] = []
    for page in documents(seed):
        more, counting = _encode(tokenizer, page)
        tokens += more
        weights += counting
        if len(tokens) > LENGTH:
            yield tokens[: LENGTH + 1], weights[: LENGTH + 1]
            tokens, weights = [], []


# ----------------------------------------------------------------------------------------------------- model


def start_weights(torch: Any) -> dict[str, Any]:
    """Return random weights under the names used in model files."""
    generator = torch.Generator().manual_seed(1)

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> Any:
        return (
            torch.randn(outputs, inputs, generator=generator) * scale / math.sqrt(inputs)
        ).requires_grad_()

    def ones(size: int) -> Any:
        return torch.ones(size, requires_grad=True)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 0.5)}
    calm = 1 / math.sqrt(2 * LAYERS)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": ones(HIDDEN),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, calm),
            f"{layer}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{layer}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, MLP, calm),
        }
    return weights | {"model.norm.weight": ones(HIDDEN)}


def forward(torch: Any, weights: dict[str, Any], tokens: Any) -> Any:
    """Return the logits of rows of tokens."""
    functional = torch.nn.functional
    count, length = tokens.shape
    angles = torch.arange(length)[:, None] * ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)[None]
    cos, sin = (part(torch.cat((angles, angles), dim=1)) for part in (torch.cos, torch.sin))

    def norm(x: Any, name: str) -> Any:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], NORM_EPS)

    def heads(x: Any, name: str, number: int) -> Any:
        return functional.linear(x, weights[f"{name}.weight"]).view(count, length, number, HEAD_DIM)

    def rotate(x: Any) -> Any:
        one, two = x.transpose(1, 2).chunk(2, dim=-1)
        return x.transpose(1, 2) * cos + torch.cat((-two, one), dim=-1) * sin

    hidden = functional.embedding(tokens, weights["model.embed_tokens.weight"])
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        attn, feed = f"{layer}.self_attn", f"{layer}.mlp"
        x = norm(hidden, f"{layer}.input_layernorm")
        q = rotate(norm(heads(x, f"{attn}.q_proj", HEADS), f"{attn}.q_norm"))
        k = rotate(norm(heads(x, f"{attn}.k_proj", KV_HEADS), f"{attn}.k_norm"))
        v = heads(x, f"{attn}.v_proj", KV_HEADS).transpose(1, 2)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(count, length, -1)
        hidden = hidden + functional.linear(mixed, weights[f"{attn}.o_proj.weight"])
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate = functional.silu(functional.linear(x, weights[f"{feed}.gate_proj.weight"]))
        up = functional.linear(x, weights[f"{feed}.up_proj.weight"])
        hidden = hidden + functional.linear(gate * up, weights[f"{feed}.down_proj.weight"])
    return functional.linear(norm(hidden, "model.norm"), weights["model.embed_tokens.weight"])


# -------------------------------------------------------------------------------------------------- training


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: warm-up, constant, linear decay to zero."""
    return RATE * min((step + 1) / WARMUP, 1.0, (steps - step) / (COOLDOWN * steps))


def train(tokenizer: Any, steps: int) -> tuple[dict[str, Array], list[tuple[int, float, float]]]:
    """Return the trained weights and the curve: step, mean loss since the last entry, seconds."""
    import torch

    weights = start_weights(torch)
    matrices = [value for name, value in weights.items() if value.ndim == 2 and "embed" not in name]
    others = [value for name, value in weights.items() if value.ndim == 1 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0),
    )
    stream = rows(tokenizer, seed=2)
    curve: list[tuple[int, float, float]] = []
    began, total = time.monotonic(), 0.0
    for step in range(steps):
        batch = [next(stream) for _ in range(ROWS)]
        tokens = torch.tensor([row[0] for row in batch])
        counting = torch.tensor([row[1] for row in batch])[:, 1:].reshape(-1)
        logits = forward(torch, weights, tokens[:, :-1])
        each = torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1), reduction="none"
        )
        loss = (each * counting).sum() / counting.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - began
            curve.append((step + 1, total / 100, seconds))
            sys.stderr.write(f"step {step + 1:5}  loss {total / 100:.4f}  {seconds:5.0f} s\n")
            total = 0.0
            sys.stderr.flush()
    return {name: value.detach().numpy() for name, value in weights.items()}, curve


# ----------------------------------------------------------------------------------------------------- files


def write_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    """Write tensors as float16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, array in tensors.items():
        data = np.ascontiguousarray(array, dtype="<f2").tobytes()
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F16", "shape": list(array.shape), "data_offsets": place}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Write the tokenizer, the configuration and the weights into a folder."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny_model.make", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder / "tokenizer.json")
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "config.json", model_config())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    weights, curve = train(tokenizer, options.steps)
    write_safetensors(folder / "model.safetensors", weights)
    for step, loss, seconds in curve:
        print(f"| {step} | {loss:.4f} | {seconds:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
