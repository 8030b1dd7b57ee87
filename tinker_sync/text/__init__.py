"""Text for models: tokenizers without a framework, and the chat templates that come with them.

Needs the `tokenizers` package and numpy; chat templates need the extra `chat`.
"""

from __future__ import annotations

from tinker_sync.text.encoded import Encoded
from tinker_sync.text.loading import get_tokenizer
from tinker_sync.text.tokenizer import Tokenizer

__all__ = ["Encoded", "Tokenizer", "get_tokenizer"]
