"""A base model that the server offers: read from a Hugging Face directory when it is first needed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_sync.local.engine import hf

if TYPE_CHECKING:
    from tinker_sync.local.engine.model import ModelConfig, Weights


class BaseModel:
    """One base model. Thread-safe; its weights are read once, by whoever asks first.

    Args:
        name: What clients call it.
        directory: `config.json`, safetensors files and `tokenizer.json`.

    Raises:
        ValueError: `config.json` is damaged, or the model is of a kind the engine does not compute.
        OSError: there is no such directory.
    """

    def __init__(self, name: str, directory: str | Path) -> None:
        self.name = name
        self.directory = Path(directory)
        self.config: ModelConfig = hf.load_config(self.directory)
        self.end_tokens = _end_tokens(self.directory)
        self._lock = threading.Lock()
        self._weights: Weights | None = None  # guarded by _lock
        self._tokenizer: Any = None  # guarded by _lock

    @property
    def arch(self) -> str:
        """The family, by whether its heads are normed."""
        return "qwen3" if self.config.qk_norm else "llama"

    @property
    def weights(self) -> Weights:
        """The weights, read now if they were not yet. Raises what `hf.load_weights` raises."""
        # Whoever comes second waits for the first, so that the weights are never in memory twice.
        with self._lock:
            if self._weights is None:
                self._weights = hf.load_weights(self.directory)
            return self._weights

    @property
    def tokenizer_id(self) -> str:
        """Where clients find the tokenizer: the directory.

        Clients of an embedded server are on its machine, and few of its models are known anywhere else.
        """
        return str(self.directory) if self.has_tokenizer else self.name

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be told from tokens, as stop texts want."""
        return (self.directory / "tokenizer.json").exists()

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, with those that are no text but have a name."""
        text: str = self._loaded_tokenizer().decode(tokens, skip_special_tokens=False)
        return text

    def _loaded_tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
            return self._tokenizer

    def __repr__(self) -> str:
        return f"BaseModel({self.name!r})"


def _end_tokens(directory: Path) -> frozenset[int]:
    """The tokens that end a text, of the files that may say so; the first that does is believed."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.exists():
            continue
        said = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if said is not None:
            return frozenset(int(token) for token in (said if isinstance(said, list) else [said]))
    return frozenset()
