"""The engine of the embedded server: a decoder in numpy that learns and samples. Arrays in, arrays out.

It knows nothing of requests, files (but for `hf`), clocks or threads. Everything is float32 unless the
weights are float64, and equal seeds give equal numbers.

    model, hf        base weights and where they come from
    ops, attention   the pieces of a layer; decoder: the layers; head: log-probabilities of tokens
    lora             adapters in one flat array
    losses           pure functions of log-probabilities; loss_inputs: what they take, checked
    optim, training  AdamW; one run with its gradients
"""

from __future__ import annotations
