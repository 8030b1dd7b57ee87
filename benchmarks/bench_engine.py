"""Measure training and sampling with the numpy engine, beside the same architecture in PyTorch eager.

    python benchmarks/bench_engine.py [--rounds N] [--threads N]     (needs torch for the comparison)

The figures are tokens per second. The model is of the Qwen3 family with random weights (192 wide, 6 layers,
4096 tokens of vocabulary, tied: 3.1 million parameters). Both sides have the same weights and the same number
of threads.

  train    forward_backward of cross-entropy on 32 sequences of 128 tokens with LoRA of rank 16 on
           everything, and one step of AdamW
  sample   64 requests with prompts of 32 tokens, 64 sampled tokens each, temperature 1; the time includes
           the prompts

PyTorch's side (`_torch_decoder.py`) takes the same number of rows at once, and has fused attention, fused
AdamW and a preallocated cache. The sides take turns. The command prints the best round of each side, because
other work of the machine can only slow a round down.

Floors: half of PyTorch's speed in training, and all of it in sampling.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_threads = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "1"
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = _threads  # both libraries read these when they are loaded

import numpy as np  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("tinker_sync") is None:
    sys.path.insert(0, str(ROOT))

from tinker_sync.local.engine.lora import LoraParams, LoraSettings  # noqa: E402
from tinker_sync.local.engine.losses import Example  # noqa: E402
from tinker_sync.local.engine.model import ModelConfig, Weights, random_weights  # noqa: E402
from tinker_sync.local.engine.sampling import Sampler, SampleSpec  # noqa: E402
from tinker_sync.local.engine.training import BATCH_ROWS, AdapterTrainer  # noqa: E402
from tinker_sync.types import AdamParams  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=4096, hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32, mlp_size=512, tied=True
)
LORA = LoraSettings(rank=16)
SEQUENCES, LENGTH = 32, 128
REQUESTS, PROMPT, NEW = 64, 32, 64
ADAM = AdamParams(learning_rate=1e-4)
FLOORS = {"train": 0.5, "sample": 1.0}


def batch() -> list[Example]:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, CONFIG.vocab_size, (SEQUENCES, LENGTH + 1))
    return [
        Example(row[:-1], {"target_tokens": row[1:], "weights": np.ones(LENGTH, np.float32)}) for row in rows
    ]


def prompts() -> Any:
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (REQUESTS, PROMPT))


# ----------------------------------------------------------------------------------------------- ours


def our_training(weights: Weights) -> Callable[[], object]:
    run, data = AdapterTrainer(weights, LORA), batch()

    def once() -> None:
        run.forward_backward(data, "cross_entropy")
        run.optim_step(ADAM)

    return once


def our_sampling(weights: Weights, params: LoraParams) -> Callable[[], object]:
    specs = [
        SampleSpec(prompt=prompt, seed=number, max_tokens=NEW, params=params)
        for number, prompt in enumerate(prompts())
    ]
    # A new sampler without a cache of prompts in each round, so that no round uses the work of another.
    return lambda: Sampler(weights, prefix_positions=0).run(specs)


# -------------------------------------------------------------------------------------------- PyTorch


def torch_sides(weights: Weights, params: LoraParams) -> dict[str, Callable[[], object]]:
    import torch
    from _torch_decoder import TorchDecoder, TorchTraining

    torch.set_num_threads(int(_threads))
    model = TorchDecoder(weights, params)
    data = batch()
    ours = AdapterTrainer(weights, LORA)
    ours.params.flat[:] = params.flat
    expected = ours.forward(data[:1], "cross_entropy").logprobs[0]
    if np.abs(model.logprobs(data[0].tokens, data[0].inputs["target_tokens"]) - expected).max() > 1e-3:
        raise SystemExit("the two sides compute different models")
    tokens = np.stack([one.tokens for one in data])
    targets = np.stack([one.inputs["target_tokens"] for one in data])
    training = TorchTraining(model, tokens, targets, BATCH_ROWS // LENGTH, ADAM.learning_rate)
    asked = torch.tensor(prompts())
    return {"train": training.step, "sample": lambda: model.sample(asked, NEW)}


# ---------------------------------------------------------------------------------------------- rounds


def best_s(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(rounds + 1):
        for name, work in sides.items():
            start = time.perf_counter()
            work()
            if turn:  # the first one warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    rounds = parser.parse_args().rounds
    weights = random_weights(CONFIG, seed=0)
    params = LoraParams.start(CONFIG, LORA)
    params.flat[:] = np.random.default_rng(3).standard_normal(len(params.flat)) * 0.02
    params = params.snapshot()
    millions = weights.count / 1e6, len(params.flat) / 1e6
    print("{:.1f} M parameters, adapter {:.2f} M".format(*millions), f"{_threads} thread(s)", sep=", ")
    ours = {"train": our_training(weights), "sample": our_sampling(weights, params)}
    theirs: dict[str, Callable[[], object]] = {}
    if importlib.util.find_spec("torch") is not None:
        theirs = torch_sides(weights, params)
    counts = {"train": SEQUENCES * LENGTH, "sample": REQUESTS * NEW}
    for job, count in counts.items():
        sides = {"numpy": ours[job]} | ({"torch": theirs[job]} if theirs else {})
        best = best_s(sides, rounds)
        line = "   ".join(f"{side} {count / seconds:8,.0f} tokens/s" for side, seconds in best.items())
        if theirs:
            ratio = best["torch"] / best["numpy"]
            verdict = "ok" if ratio >= FLOORS[job] else "BELOW"
            line += f"   ratio {ratio:.2f}, floor {FLOORS[job]} {verdict}"
        print(f"{job:6}  {line}")


if __name__ == "__main__":
    main()
