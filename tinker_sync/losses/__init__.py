"""Custom losses for `forward_backward_custom` and `create_custom_loss`, and ready-made ones.

Ready-made losses work in numpy and return their gradients. Pass an instance to `forward_backward_custom` or
`forward_custom`.

    CrossEntropy, ImportanceSampling, PPO      the server's losses, to be summed with other losses
    DPO                                        preferences between answers; dpo_pairs arranges the data
    KLToReference, Distance, EntropyBonus      regularizers; with_reference adds the data of a reference model
    Consistency                                the same answer in two contexts
    LabelSmoothing                             cross-entropy over several targets for a token
    WeightedSum                                the sum of any of these and of custom losses

`divergence` compares the model that is trained with the one that sampled.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync.losses.evaluate": "NumpyLossFn TorchLossFn numpy_loss",
    "tinker_sync.losses.data": "with_reference",
    "tinker_sync.losses.handle": "LossHandle PerDatumLossFn",
    "tinker_sync.losses.ratios": "Divergence RatioFigures SequenceFigures divergence",
    "tinker_sync.losses.ready": """
        Consistency CrossEntropy DPO Distance EntropyBonus ImportanceSampling KLToReference LabelSmoothing
        PPO TokenLoss WeightedSum dpo_pairs
    """,
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
