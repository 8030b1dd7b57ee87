"""The engine of the embedded server: a decoder in numpy that learns and samples. Arrays in, arrays out.

    model        base weights, and Hugging Face files of them; safetensors: the file format
    decoder      the parts of a layer, the layers, and the head: log-probabilities of tokens
    lora         adapters in one flat array
    losses       pure functions of log-probabilities, and their checked inputs
    custom_graph losses that users upload
    training     one adapter with its gradients, and AdamW
    sampling     all sample requests together, token by token, with a cache of prompts
    host         the two threads that compute, and the training runs and base models that they own

Apart from `host`, it uses no requests, no files (except in `model`), no clocks and no threads. Numbers are
float32 unless the weights are float64, and equal seeds give equal numbers. One thread at a time uses a
trainer or a sampler.
"""

from __future__ import annotations
