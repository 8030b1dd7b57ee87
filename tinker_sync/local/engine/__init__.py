"""The engine of the embedded server: a decoder in numpy that learns and samples. Arrays in, arrays out.

It uses no requests, no files (except in `hf`), no clocks and no threads. Numbers are float32 unless the
weights are float64, and equal seeds give equal numbers. One thread at a time uses a trainer or a sampler.

    model, hf        base weights, and Hugging Face files of them
    ops, attention   the parts of a layer; decoder: the layers; head: log-probabilities of tokens
    lora             adapters in one flat array
    losses           pure functions of log-probabilities; loss_inputs: their checked inputs
    custom_graph     losses that users upload
    optim, training  AdamW; one adapter with its gradients
    sample_spec      requests and results of the sampler; sampler: all requests together, token by token
    prefill          prompts, and a cache of earlier prompts; kv_cache: the sequences being continued
    choose           the choice of tokens from logits
"""

from __future__ import annotations
