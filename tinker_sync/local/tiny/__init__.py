"""The built-in base model: a decoder of under a million parameters that knows simple English and arithmetic.

A Hugging Face directory of the Qwen3 family that ships with the package; see the README beside it.
`python -m tinker_sync.local.tiny` prints how good it is, `make` makes it anew (that needs torch).

    words, stories   simple English: what it speaks of, and how
    tasks            sums, copies and reversals
    page, corpus     documents of all that, without end
    scores           what the model makes of problems it never saw
    make             tokenizer and weights
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

NAME: Final = "tinker-sync/tiny"
"""What clients call it."""


def directory() -> Path:
    """Where its files are: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.

    >>> from tinker_sync.local.engine.hf import load_config
    >>> load_config(directory()).vocab_size
    512
    """
    return Path(__file__).parent / "files"
