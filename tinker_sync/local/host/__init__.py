"""The computing threads of the embedded server, which own training runs and samplers over base models.

    base_model   a Hugging Face directory: weights, tokenizer, end tokens
    workers      the two threads: one trains, job after job; one samples all requests together
    host         both threads, and the runs in memory
    blas         the limit on the threads of matrix products

Its interface is arrays and futures. It imports neither the HTTP server nor the protocol nor the store.
"""

from __future__ import annotations
