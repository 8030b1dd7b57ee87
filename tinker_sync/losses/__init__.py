"""Losses of your own: what `forward_backward_custom` and `create_custom_loss` take, and ready ones.

Ready losses work in numpy and return their gradients; each is a plain callable for `forward_backward_custom`.

    CrossEntropy, ImportanceSampling, PPO      as the server's, for sums with others
    DPO                                        pairs of answers, see dpo_pairs
    KLToReference, EntropyBonus                what holds a policy back; with_reference brings the reference
    LabelSmoothing                             several targets a token
    WeightedSum                                of any of these and your own
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.losses._kinds import (
        NumpyLossFn,
        TorchLossFn,
        numpy_loss,
    )
    from tinker_sync.losses.compose import (
        WeightedSum,
    )
    from tinker_sync.losses.given import (
        with_reference,
    )
    from tinker_sync.losses.handle import (
        LossHandle,
        PerDatumLossFn,
    )
    from tinker_sync.losses.preference import (
        DPO,
        dpo_pairs,
    )
    from tinker_sync.losses.tokens import (
        PPO,
        CrossEntropy,
        EntropyBonus,
        ImportanceSampling,
        KLToReference,
        LabelSmoothing,
        TokenLoss,
    )

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.losses._kinds": ("NumpyLossFn", "TorchLossFn", "numpy_loss"),
    "tinker_sync.losses.compose": ("WeightedSum",),
    "tinker_sync.losses.given": ("with_reference",),
    "tinker_sync.losses.handle": ("LossHandle", "PerDatumLossFn"),
    "tinker_sync.losses.preference": ("DPO", "dpo_pairs"),
    "tinker_sync.losses.tokens": (
        "CrossEntropy",
        "EntropyBonus",
        "ImportanceSampling",
        "KLToReference",
        "LabelSmoothing",
        "PPO",
        "TokenLoss",
    ),
}

__all__ = [
    "DPO",
    "PPO",
    "CrossEntropy",
    "EntropyBonus",
    "ImportanceSampling",
    "KLToReference",
    "LabelSmoothing",
    "LossHandle",
    "NumpyLossFn",
    "PerDatumLossFn",
    "TokenLoss",
    "TorchLossFn",
    "WeightedSum",
    "dpo_pairs",
    "numpy_loss",
    "with_reference",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
