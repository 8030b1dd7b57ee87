"""Tokenizers and chat templates, without a machine-learning framework.

- `loading` holds `get_tokenizer`; `hub` finds the files.
- `tokenizer` encodes and decodes; `setup` reads and writes the files beside the vocabulary and gives the
  special tokens as attributes, `encoded` shapes the results.
- `chat` renders messages with `template`, which also describes tools.

Any thread may use a tokenizer. Chat templates need the extra `chat`. This package uses no client or server.
"""

from __future__ import annotations

from tinker_sync.text.encoded import Encoded
from tinker_sync.text.loading import get_tokenizer
from tinker_sync.text.tokenizer import Tokenizer

__all__ = ["Encoded", "Tokenizer", "get_tokenizer"]
