"""The parts of a server, put together and taken apart again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import ConfigurationError

if TYPE_CHECKING:
    from tinker_sync.local.host.base_model import BaseModel
    from tinker_sync.local.server.http1 import Asgi

_ELSEWHERE: Final = "; name another directory (--data-dir, or TINKER_LOCAL_DATA_DIR for base_url='local')"


@contextmanager
def assembled(
    data_dir: Path, *, key: str, model: str | Path | None = None, flags: dict[str, Any] | None = None
) -> Iterator[Asgi]:
    """An application over a store and a host, for as long as the block lasts.

    Args:
        data_dir: where it keeps its state.
        key: what clients have to send.
        model: a Hugging Face directory, offered under its name beside the built-in model.
        flags: settings of the server, by name.

    Raises:
        ConfigurationError: the directory, the model or a setting cannot be used.
    """
    # Here, since they take most of the time that a server needs to start.
    from tinker_sync.local.host.host import Host
    from tinker_sync.local.server.app import build
    from tinker_sync.local.server.flags import Flags
    from tinker_sync.local.store import Store, StoreError

    models = _models(model)
    chosen = Flags.of(**(flags or {}))
    try:
        store = Store(data_dir)
    except StoreError as problem:
        advice = _ELSEWHERE if problem.kind in ("unwritable", "full") else ""
        raise ConfigurationError(f"{problem}{advice}") from problem
    with store:
        yield build(store, Host(models), key=key, flags=chosen)


def _models(directory: str | Path | None) -> list[BaseModel]:
    from tinker_sync.local import tiny
    from tinker_sync.local.host.base_model import BaseModel

    models = [BaseModel(tiny.NAME, tiny.directory())]
    if directory is not None:
        path = Path(directory).expanduser().absolute()
        try:
            models.append(BaseModel(path.name, path))
        except (OSError, ValueError) as problem:
            raise ConfigurationError(f"there is no model in {path}: {problem}") from problem
    return models
