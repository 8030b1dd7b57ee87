"""Handles of traced losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.losses.handle import LossHandle as LossHandle
    from tinker_sync.losses.handle import PerDatumLossFn as PerDatumLossFn

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.losses.handle": (
        "LossHandle",
        "PerDatumLossFn",
    ),
}

__all__ = ["LossHandle", "PerDatumLossFn"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
