"""The engine of the embedded server: a decoder in numpy that learns and samples. Arrays in, arrays out.

It knows nothing of requests, files (but for `hf`), clocks or threads. Everything is float32 unless the
weights are float64, and equal seeds give equal numbers.

    model, hf        base weights and where they come from
    ops, attention   the pieces of a layer; decoder: the layers; head: log-probabilities of tokens
    lora             adapters in one flat array
    losses           pure functions of log-probabilities; loss_inputs: what they take, checked
    optim, training  AdamW; one run with its gradients
    sample_spec      what is asked of the sampler; sampler: everybody's requests, one token of each a step
    prefill, prefix  prompts, and those seen before; kv_cache: what is being continued
    choose           tokens from logits
"""

from __future__ import annotations
