"""The built-in base model: a decoder of under a million parameters that knows simple English and arithmetic.

It is a Hugging Face directory of the Qwen3 family, which comes with the package. The README beside this file
describes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

NAME: Final = "tinker-sync/tiny"
"""The name of the model in requests."""


def directory() -> Path:
    """Return the folder of config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    >>> from tinker_sync.local.engine.model import load_config
    >>> load_config(directory()).vocab_size
    512
    """
    return Path(__file__).parent / "files"
