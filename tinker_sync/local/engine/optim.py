"""AdamW over one flat array of parameters, with decoupled weight decay and bias correction."""

from __future__ import annotations

import math

import attrs
import numpy as np

from tinker_sync.local.engine._arrays import Array


@attrs.frozen(kw_only=True)
class AdamSettings:
    """The settings of one step of AdamW; `grad_clip_norm` 0 disables clipping.

    Raises:
        ValueError: a setting is not finite or out of its range.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __attrs_post_init__(self) -> None:
        for field in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}: must be finite and not negative, got {value}")
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{field}: must be at least 0 and below 1, got {getattr(self, field)}")


@attrs.define(eq=False)
class AdamState:
    """The state of the optimizer: both moments of the gradients, and the number of steps.

    >>> weights, state = np.ones(1), AdamState.start(np.ones(1))
    >>> norm = state.step(weights, np.array([3.0]), AdamSettings(learning_rate=0.1))
    >>> float(weights[0].round(6)), float(norm), state.steps
    (0.9, 3.0, 1)
    """

    first: Array
    second: Array
    steps: int = 0

    @classmethod
    def start(cls, weights: Array) -> AdamState:
        """Return the state before the first step."""
        return cls(np.zeros_like(weights), np.zeros_like(weights))

    def step(self, weights: Array, grads: Array, settings: AdamSettings) -> float:
        """Change `weights` by one step.

        Args:
            weights: Flat; changed in place.
            grads: Flat; scaled in place by clipping.
            settings: The settings of this step.

        Returns:
            The norm of the gradients before clipping.

        Raises:
            ValueError: some gradients are not finite; weights and state stay unchanged.
        """
        norm = math.sqrt(float(np.dot(grads, grads))) if len(grads) else 0.0
        if not math.isfinite(norm):
            norm = math.sqrt(float(np.square(grads, dtype=np.float64).sum()))
        if not math.isfinite(norm):
            raise ValueError("gradients: not all of them are finite, so no step was taken")
        shrink = settings.grad_clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does
        if 0 < shrink < 1:
            grads *= shrink
        self.steps += 1
        weights *= 1 - settings.learning_rate * settings.weight_decay
        self.first *= settings.beta1
        self.first += grads * (1 - settings.beta1)
        self.second *= settings.beta2
        square = grads * grads
        square *= 1 - settings.beta2
        self.second += square
        np.sqrt(self.second, out=square)
        square /= math.sqrt(1 - settings.beta2**self.steps)
        square += settings.eps
        np.divide(self.first, square, out=square, where=square > 0)
        square *= settings.learning_rate / (1 - settings.beta1**self.steps)
        weights -= square
        return norm
