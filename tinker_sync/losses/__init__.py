"""Losses of your own: what `forward_backward_custom` and `create_custom_loss` take, and ready ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.losses._kinds import (
        NumpyLossFn,
        TorchLossFn,
        numpy_loss,
    )
    from tinker_sync.losses.handle import (
        LossHandle,
        PerDatumLossFn,
    )

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.losses._kinds": ("NumpyLossFn", "TorchLossFn", "numpy_loss"),
    "tinker_sync.losses.handle": ("LossHandle", "PerDatumLossFn"),
}

__all__ = [
    "LossHandle",
    "NumpyLossFn",
    "PerDatumLossFn",
    "TorchLossFn",
    "numpy_loss",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
