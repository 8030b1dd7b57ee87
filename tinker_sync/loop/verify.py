"""`verify_checkpoint`: a check that a checkpoint restores what was saved.

The server restores the checkpoint into a second model, the copy. A forward pass of a small batch, the probe,
stands for the weights: its loss in the copy must be that of a pass that the saved model computed.

A server shows no state of its optimizer. So the copy takes a step whose gradients are all zero. A restored
optimizer still moves the weights by its mean of earlier gradients. A new optimizer has no such mean, and the
loss of the probe stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from tinker_sync.errors import InvalidInputError, TinkerError, UnsupportedByServerError, VerificationError
from tinker_sync.types import AdamParams, Datum, ForwardBackwardOutput, OptimParams

TOLERANCE: Final = 1e-3
"""The relative difference that is allowed between two computations of the same loss."""
_LOSS: Final = "cross_entropy"
# Far above usual rates, so that a step by the mean of earlier gradients shows in the loss. The copy is lost
# anyway.
_RATE: Final = 1e-2
_UNLOAD_S: Final = 60.0


class RestoringService(Protocol):
    """The part of a service client that a verification uses."""

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        """Return a training client for a checkpoint."""


def verify_checkpoint(
    service: RestoringService,
    path: str,
    probe: Sequence[Datum],
    before: ForwardBackwardOutput,
    *,
    step: OptimParams | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Restore a checkpoint into a second model, and compare that model with the one that was saved. Blocks.

    The saved model does not change, and may train on meanwhile. The cost is a restore, two or four passes of
    the probe, and a place for one more model at the server until this function returns.

    Args:
        service: makes the second model.
        path: the checkpoint, from `save_state`.
        probe: a small batch with `target_tokens`.
        before: the result of ``training.forward(probe, "cross_entropy")``, computed after the last step
            before the save.
        step: the settings of that step, to verify that the state of the optimizer is restored too; None: the
            weights alone are verified.
        tolerance: the relative difference of two losses to accept as noise of the server; smaller differences
            are not noticed.

    Raises:
        VerificationError: the weights differ, or the state of the optimizer was not restored.
        UnsupportedByServerError: the server returns no loss.
        InvalidInputError: `tolerance` is not between 0 and 1.

    >>> import tinker_sync
    >>> from tinker_sync import Datum, ModelInput
    >>> from tinker_sync.loop import verify_checkpoint
    >>> probe = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})]
    >>> step = tinker_sync.AdamParams(learning_rate=1e-3)
    >>> with tinker_sync.ServiceClient(base_url="local") as service:
    ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
    ...     passed = training.forward_backward(probe, "cross_entropy")
    ...     stepped = training.optim_step(step)
    ...     before = training.forward(probe, "cross_entropy")
    ...     saved = training.save_state("step-1").result()
    ...     verify_checkpoint(service, saved.path, probe, before.result(), step=step)
    """
    given: object = tolerance
    if not (isinstance(given, (int, float)) and 0 < given < 1):
        raise InvalidInputError(f"tolerance: expected a number between 0 and 1, got {tolerance!r}")
    expected = _loss_of(before)
    copy = service.create_training_client_from_state_with_optimizer(path)
    try:
        loss = _loss_of(copy.forward(probe, _LOSS).result())
        if _differ(loss, expected, tolerance):
            raise VerificationError(
                f"{path} does not restore the weights that were saved: the loss of the probe was "
                f"{expected:.6g} before the save, and is {loss:.6g} in the restored model"
            )
        if step is None:
            return
        copy.forward_backward([_without_gradient(datum) for datum in probe], _LOSS).result()
        # Adam gets a rate that changes the loss visibly.
        copy.optim_step(AdamParams(learning_rate=_RATE) if isinstance(step, AdamParams) else step).result()
        moved = _loss_of(copy.forward(probe, _LOSS).result())
        if not _differ(moved, loss, tolerance):
            raise VerificationError(
                f"{path} restores the weights, but with a new optimizer: a step without gradients leaves the "
                f"loss of the probe at {moved:.6g}. The server has not kept the optimizer state, or all "
                "gradients before the save were zero"
            )
    finally:
        with suppress(TinkerError):  # the server frees the place with the session
            copy.unload(deadline=_UNLOAD_S).result()


def _without_gradient(datum: Datum) -> Datum:
    inputs = dict(datum.loss_fn_inputs)
    weights = [0.0] * math.prod(inputs["target_tokens"].shape or [len(inputs["target_tokens"].data)])
    return Datum(datum.model_input, {**inputs, "weights": weights})


def _differ(one: float, other: float, tolerance: float) -> bool:
    return not abs(one - other) <= tolerance * max(abs(one), abs(other))


def _loss_of(passed: ForwardBackwardOutput) -> float:
    """Return the loss of the probe, from its log-probabilities, else from the metrics."""
    outputs = passed.loss_fn_outputs
    if outputs and "logprobs" in outputs[0]:
        loss = -math.fsum(float(value) for output in outputs for value in output["logprobs"].data)
    else:
        loss = passed.metrics.get("loss:sum", math.nan)
    if not math.isfinite(loss):
        raise UnsupportedByServerError(
            "verify_checkpoint: this server returns no usable loss of a forward pass",
            feature="verify_checkpoint",
        )
    return loss
