"""`TrainingClient`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.clients.training import TrainingClient as TrainingClient

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.clients.training": ("TrainingClient",),
}

__all__ = ["TrainingClient"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
