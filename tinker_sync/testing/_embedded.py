"""The embedded server as an ASGI application with a life of its own: what `LocalServer` serves.

Weights are read once in a process, and shared by every server there: a server is then made in milliseconds.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import InvalidInputError

if TYPE_CHECKING:
    from tinker_sync.local.host.base_model import BaseModel
    from tinker_sync.local.server.http1 import Asgi

TINY: Final = "tinker-sync/tiny"
RANDOM: Final = "tinker-sync/random"


class Embedded:
    """A store, a host and the application over them, in this process. For one owner.

    Args:
        model: the base model: a name of `base_model`, or a directory.
        key: what clients must show.
        data_dir: where state is kept.
        settings: of the server, by name.
    """

    def __init__(self, *, model: str, key: str, data_dir: Path, settings: dict[str, Any]) -> None:
        from tinker_sync.local.host.host import Host
        from tinker_sync.local.server.app import build
        from tinker_sync.local.server.flags import Flags
        from tinker_sync.local.store import Store

        flags, base = Flags.of(**settings), base_model(model)
        self._store = Store(data_dir)
        self.app: Asgi = build(self._store, Host([base]), flags=flags, key=key)

    def close(self) -> None:
        """Let go of the files. What served the application must have stopped."""
        self._store.close()


@lru_cache(maxsize=8)
def base_model(name: str) -> BaseModel:
    """A base model, the same for all who ask in this process.

    Args:
        name: "tinker-sync/tiny", "tinker-sync/random" (a few thousand random weights, which compute nonsense
            at once), or a Hugging Face directory.

    >>> base_model("tinker-sync/random").config.vocab_size
    256
    >>> base_model("tinker-sync/random") is base_model("tinker-sync/random")
    True
    """
    from tinker_sync.local.host.base_model import BaseModel

    if name == RANDOM:
        return _random_model()
    if name == TINY:
        from tinker_sync.local import tiny

        return BaseModel(TINY, tiny.directory())
    directory = Path(name)
    if not (directory / "config.json").exists():
        raise InvalidInputError(f"{name!r} is neither {TINY} nor {RANDOM} nor a directory with a config.json")
    return BaseModel(directory.name, directory)


def _random_model() -> BaseModel:
    from tinker_sync.local.engine.model import ModelConfig, Weights, random_weights
    from tinker_sync.local.host.base_model import BaseModel

    class RandomModel(BaseModel):
        """A base model that is in no file."""

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

    return RandomModel()
