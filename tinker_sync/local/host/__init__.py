"""The computing side of the embedded server: threads that own training runs and samplers over base models.

    base_model   a Hugging Face directory: weights, tokenizer, where a text ends
    workers      the two threads: one trains, job after job; one samples, everybody's requests together
    host         both, and the runs in memory
    blas         how many threads products take

It knows arrays and futures, and neither HTTP nor the protocol nor where checkpoints are kept.
"""

from __future__ import annotations
