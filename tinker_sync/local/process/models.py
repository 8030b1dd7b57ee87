"""Base models by name: the built-in one, a random one for tests, and Hugging Face directories.

The servers of a process share the weights of a model. Any thread may call this module.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from tinker_sync.errors import InvalidInputError
from tinker_sync.local import tiny
from tinker_sync.local.engine.model import ModelConfig, Weights, random_weights
from tinker_sync.local.host.base_model import BaseModel

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
