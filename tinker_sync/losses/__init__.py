"""Custom losses for `forward_backward_custom` and `create_custom_loss`, and ready-made ones.

Ready-made losses work in numpy and return their gradients. Each is a callable for `forward_backward_custom`.

    CrossEntropy, ImportanceSampling, PPO      the server's losses, for sums with others
    DPO                                        pairs of answers, see dpo_pairs
    KLToReference, EntropyBonus                regularizers of a policy; with_reference adds the reference
    LabelSmoothing                             several targets for a token
    WeightedSum                                any of these and custom losses
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
    from tinker_sync.losses.data import (
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
    "tinker_sync.losses.data": ("with_reference",),
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
