"""Base models by name: the built-in one, a random one for tests, and Hugging Face directories.

The servers of a process share the weights of a model, which are read on first use. Any thread may call this
module.
"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tinker_sync.errors import InvalidInputError
from tinker_sync.local import tiny
from tinker_sync.local.engine import hf
from tinker_sync.local.engine.model import ModelConfig, Weights, random_weights


class BaseModel:
    """A base model that the server trains adapters of and samples from. Thread-safe.

    Args:
        name: The name of the model in requests.
        directory: The folder of `config.json`, safetensors files and `tokenizer.json`.

    Raises:
        ValueError: `config.json` or `generation_config.json` is damaged, or the engine does not compute this
            kind of model.
        OSError: the directory is missing, or has no `config.json`.
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
        """The model family: "qwen3", which normalizes queries and keys in its attention, or "llama"."""
        return "qwen3" if self.config.qk_norm else "llama"

    @property
    def weights(self) -> Weights:
        """The weights, read on first use. Raises as `hf.load_weights` does."""
        # The lock is held while reading, so that two threads never hold the weights twice.
        with self._lock:
            if self._weights is None:
                self._weights = hf.load_weights(self.directory)
            return self._weights

    @property
    def tokenizer_id(self) -> str:
        """The directory, where clients on this machine find the tokenizer; without one, the model's name."""
        return str(self.directory) if self.has_tokenizer else self.name

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer, which stop texts need."""
        return (self.directory / "tokenizer.json").exists()

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special tokens included. Call this only if `has_tokenizer` is True."""
        text: str = self._load_tokenizer().decode(tokens, skip_special_tokens=False)
        return text

    def _load_tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
            return self._tokenizer

    def __repr__(self) -> str:
        return f"BaseModel({self.name!r})"


def _end_tokens(directory: Path) -> frozenset[int]:
    """Return the ids of the tokens that end a text.

    They are in `generation_config.json` or else in `config.json`. If neither lists them, the result is empty.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.exists():
            continue
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"{path}: must hold an object")  # noqa: TRY004  # damage in a file
        ids = tree.get("eos_token_id")
        if ids is not None:
            return frozenset(int(token) for token in (ids if isinstance(ids, list) else [ids]))
    return frozenset()


RANDOM: Final = "tinker-sync/random"


@lru_cache(maxsize=8)
def load_base_model(name: str) -> BaseModel:
    """Return the base model with a name. Later calls return the same object for the eight names used last.

    Args:
        name: "tinker-sync/tiny", "tinker-sync/random" (some 27,000 random weights, which compute nonsense
            quickly), or a Hugging Face directory; the model then has the name of the directory.

    Raises:
        InvalidInputError: there is no such model, or its configuration cannot be used. Its weights are read
            later, on first use.

    >>> load_base_model("tinker-sync/random").config.vocab_size
    256
    >>> load_base_model("tinker-sync/random") is load_base_model("tinker-sync/random")
    True
    """
    if name == RANDOM:
        return _RandomModel()
    if name == tiny.NAME:
        return BaseModel(tiny.NAME, tiny.directory())
    directory = Path(name).expanduser().absolute()
    if not (directory / "config.json").exists():
        raise InvalidInputError(
            f"there is no model in {directory}; give {tiny.NAME}, {RANDOM}, or a directory with a config.json"
        )
    try:
        return BaseModel(directory.name, directory)
    except (OSError, ValueError) as problem:
        raise InvalidInputError(f"there is no model in {directory}: {problem}") from problem


class _RandomModel(BaseModel):
    """The model `RANDOM`: it needs no files, because its weights are random."""

    def __init__(self) -> None:
        self.name = RANDOM
        self.config = ModelConfig(
            vocab_size=256, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_size=64
        )
        self.end_tokens: frozenset[int] = frozenset()
        self._random_weights = random_weights(self.config, seed=0, scale=0.1)

    @property
    def weights(self) -> Weights:
        return self._random_weights

    @property
    def has_tokenizer(self) -> bool:
        return False
