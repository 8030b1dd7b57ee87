"""Checks of the results of training calls against their requests. Pure; any thread.

A result that is too short, or that belongs to another call, fails the call that waits for it. The checks of
samples are in `sample_response`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from attrs import frozen

from tinker_sync.errors import WireError
from tinker_sync.types.datum import Datum
from tinker_sync.types.training import ForwardBackwardOutput

_TARGETS: Final = "target_tokens"
_SCORES: Final = "logprobs"
# The three kinds of saves are one family: some servers mark all of them alike.
_FAMILIES: Final = {
    "create_model": "create_model",
    "load_weights": "load_weights",
    "optim_step": "optim_step",
    "sample": "sample",
    "save_weights": "save_weights",
    "save_weights_external": "save_weights",
    "save_weights_for_sampler": "save_weights",
    "unload_model": "unload_model",
}


@frozen
class ExpectedOutputs:
    """The outputs that a request with some data must have.

    Attributes:
        sizes: the number of targets of each datum; None if that is unknown.
        whole: whether each output must have a score for every target; servers of older versions may leave
            out targets that have no weight.
    """

    sizes: tuple[int | None, ...]
    whole: bool

    @classmethod
    def of(cls, data: Sequence[Datum], *, whole: bool) -> ExpectedOutputs:
        """Return the outputs that a request with these data must have."""
        return cls(tuple(_target_count(datum) for datum in data), whole)

    def check(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Return the output.

        Raises:
            WireError: the number of records differs from that of the data, or the number of scores does not
                fit that of the targets.

        >>> expected = ExpectedOutputs((2,), whole=True)
        >>> expected.check(ForwardBackwardOutput("ArrayRecord", []))
        Traceback (most recent call last):
            ...
        tinker_sync.errors.WireError: loss_fn_outputs: expected 1, one for each datum, got 0
        """
        records = output.loss_fn_outputs
        if len(records) != len(self.sizes):
            raise WireError(
                f"expected {len(self.sizes)}, one for each datum, got {len(records)}", "loss_fn_outputs"
            )
        for index, (record, expected) in enumerate(zip(records, self.sizes, strict=True)):
            scores = record.get(_SCORES)
            if scores is None or expected is None:
                continue
            size = math.prod(scores._effective_shape)
            if size > expected or (self.whole and size < expected):
                raise WireError(
                    f"expected {expected} values, one for each target, got {size}",
                    f"loss_fn_outputs[{index}].{_SCORES}",
                )
        return output


def _target_count(datum: Datum) -> int | None:
    targets = datum.loss_fn_inputs.get(_TARGETS)
    # Of sparse targets a server may score those that are stored.
    if targets is None or targets.sparse_crow_indices is not None:
        return None
    return math.prod(targets._effective_shape)


def check_kind(name: str, tree: Any) -> None:
    """Refuse a result that is marked as the result of another call.

    Raises:
        WireError: the mark names another call.

    >>> check_kind("save_weights", {"path": "tinker://run/weights/a", "type": "save_weights_for_sampler"})
    >>> check_kind("optim_step", {"type": "load_weights"})
    Traceback (most recent call last):
        ...
    tinker_sync.errors.WireError: type: expected the result of optim_step, got that of load_weights
    """
    kind = tree.get("type") if isinstance(tree, dict) else None
    if isinstance(kind, str) and _FAMILIES.get(kind, name) != _FAMILIES.get(name, name):
        raise WireError(f"expected the result of {name}, got that of {kind}", "type")


def check_saved(path: str | None, session: str | None = None) -> None:
    """Refuse the result of a save that names no saved weights.

    Raises:
        WireError: the result has neither a path nor a sampling session.
    """
    if not path and not session:
        raise WireError("the result names nothing that was saved", "path")


def check_model(model_id: str, result: Any) -> None:
    """Refuse a result that names another model; most results name none.

    Raises:
        WireError: the result names another model.
    """
    if getattr(result, "model_id", None) not in (None, "", model_id):
        raise WireError("it belongs to another model", "model_id")
