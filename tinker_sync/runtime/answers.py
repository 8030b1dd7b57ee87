"""The results of training calls: checked against their requests, and merged from the outputs of chunks.

The functions are pure, and any thread may call them. A result that is too short, or that belongs to another
call, fails the call that waits for it. The checks of samples are in `sample_response`. Metrics that cannot be
reduced raise no error.

A metric key is `name:reduction` with exactly one colon. The reduction covers the chunks that have the key.
The weight of a chunk is the number of its outputs:

    mean            weighted mean; the plain mean if all weights are 0
    sum, min, max   sum, smallest and largest value
    slack           largest minus mean
    hash2           sum of the whole parts modulo 2**64, an exact int
    unique          every value, see below

Three cases keep one value per chunk, as `unique` does: a key without exactly one colon, a reduction that is
not in this list, and values that cannot be reduced (a hash2 of infinity, text, None). The first value keeps
the key itself. Later values get `key_1`, `key_2` and so on; names that a chunk uses itself are skipped. Keys
appear in the order in which the chunks first have them. The result has the keys of all chunks, not only those
of the first.

`loss` and `loss:sum` may both be present and do not affect each other. `loss:sum` is the loss of the whole
call and takes precedence if one number is needed. A bare `loss` names no reduction, so it stays per
chunk (`loss`, `loss_1`) and never becomes or replaces `loss:sum`. With a single chunk a bare `loss` is the
loss of the whole call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tinker_sync._lazy import LazyModule
from tinker_sync._numpy import np
from tinker_sync._observe import TokensUsed
from tinker_sync.errors import WireError
from tinker_sync.types.datum import Datum
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput
from tinker_sync.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_sync.runtime.spending import Reservation
    from tinker_sync.wire.proto import outputs
else:  # it needs numpy
    outputs = LazyModule("tinker_sync.wire.proto.outputs")

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
    """The number of outputs, and of scores in each output, that the result of a request must have.

    Attributes:
        sizes: the number of targets of each datum; None if that is unknown.
        whole: True if each output must have a score for every target; servers of older versions may leave out
            targets that have no weight.
    """

    sizes: tuple[int | None, ...]
    whole: bool

    @classmethod
    def of(cls, data: Sequence[Datum], *, whole: bool) -> ExpectedOutputs:
        """Return the expected outputs of a request with these data."""
        return cls(tuple(_target_count(datum) for datum in data), whole)

    def check(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Return the output if it has the expected numbers of records and scores.

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
            size = scores._numpy.size if scores._crow is None else math.prod(scores._effective_shape)
            if size > expected or (self.whole and size < expected):
                raise WireError(
                    f"expected {expected} values, one for each target, got {size}",
                    f"loss_fn_outputs[{index}].{_SCORES}",
                )
        return output


def _target_count(datum: Datum) -> int | None:
    targets = datum.loss_fn_inputs.get(_TARGETS)
    # A server may return scores for the stored elements of sparse targets only.
    if targets is None or targets._crow is not None:
        return None
    return int(targets._numpy.size)


def check_kind(name: str, tree: Any) -> None:
    """Refuse a result whose `type` names another kind of call.

    Raises:
        WireError: the type names another kind of call.

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
    """Refuse the result of a save that has no path and no sampling session.

    Raises:
        WireError: the result has neither.
    """
    if not path and not session:
        raise WireError("the result names nothing that was saved", "path")


def check_model(model_id: str, result: Any) -> None:
    """Refuse a result that has the id of another model. Most results have no model id.

    Raises:
        WireError: the result has the id of another model.
    """
    if getattr(result, "model_id", None) not in (None, "", model_id):
        raise WireError("it belongs to another model", "model_id")


_MASK: Final = 2**64 - 1
_LOSS: Final = "loss:sum"


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Return the output of a call, merged from the outputs of its chunks.

    `outputs` has at least one, in the order of the chunks.

    >>> first = ForwardBackwardOutput("ArrayRecord", [{}], {"loss:sum": 1.5})
    >>> second = ForwardBackwardOutput("ArrayRecord", [{}, {}], {"loss:sum": 2.0, "loss": 0.1})
    >>> merged = merge_outputs([first, second])
    >>> len(merged.loss_fn_outputs), merged.metrics
    (3, {'loss:sum': 3.5, 'loss': 0.1})
    """
    assert outputs, "nothing to merge"  # noqa: S101
    if len(outputs) == 1 and all(map(_stands_alone, outputs[0].metrics.items())):
        return outputs[0]
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=list(chain.from_iterable(output.loss_fn_outputs for output in outputs)),
        metrics=merge_metrics(
            [output.metrics for output in outputs], [len(output.loss_fn_outputs) for output in outputs]
        ),
    )


def add_mean_loss(output: ForwardBackwardOutput, trained: int) -> ForwardBackwardOutput:
    """Return the output of a call with `loss:mean`: `loss:sum` divided by the number of tokens it counts.

    A `loss:mean` from the server stays as it is.

    >>> add_mean_loss(ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 6.0}), 4).metrics
    {'loss:sum': 6.0, 'loss:mean': 1.5}
    """
    metrics = output.metrics
    if not trained or "loss:sum" not in metrics or "loss:mean" in metrics:
        return output
    return output._with(metrics={**metrics, "loss:mean": metrics["loss:sum"] / trained})


def add_loss(
    output: ForwardBackwardOutput, weights: Sequence[TensorData | None] | None
) -> ForwardBackwardOutput:
    """Return the output with `loss:sum`, computed from its rows if the server does not send this metric.

    The output stays as it is if its rows do not contain the needed values.

    Args:
        output: the output of one chunk.
        weights: for a cross-entropy, the weights of each datum; None stands for weights that are all 1. For
            another loss, None: the rows of `output` must then contain `elementwise_loss`.

    >>> rows = [{"logprobs": {"data": [-1.0, -2.0], "dtype": "float32"}}]
    >>> add_loss(ForwardBackwardOutput("scalar", rows, {}), [None]).metrics
    {'loss:sum': 3.0}
    """
    if _LOSS in output.metrics:
        return output
    try:
        total = _sum_loss(output, weights)
    except (KeyError, ValueError):  # an output without the tensor, or of another length
        return output
    return output.model_copy(update={"metrics": {**output.metrics, _LOSS: total}})


def _sum_loss(output: ForwardBackwardOutput, weights: Sequence[TensorData | None] | None) -> float:
    rows = output.loss_fn_outputs
    if weights is None:
        return float(sum(np.sum(row["elementwise_loss"].to_numpy()) for row in rows))
    total = 0.0
    for row, weight in zip(rows, weights, strict=True):
        scores = row["logprobs"].to_numpy().reshape(-1)
        # A token of weight 0 adds nothing, even if its score is infinite.
        counted = np.ones(len(scores)) if weight is None else weight.to_numpy().reshape(-1)
        total -= float(np.sum(np.where(counted != 0, scores, 0.0) * counted))
    return total


def merge_metrics(chunks: Sequence[Mapping[str, Any]], weights: Sequence[int]) -> dict[str, Any]:
    """Return the metrics of a call, merged from the metrics of its chunks.

    Args:
        chunks: the metrics of each chunk.
        weights: the number of outputs of each chunk.

    >>> merge_metrics([{"a:mean": 1, "clock:unique": 7}, {"a:mean": 2, "clock:unique": 8}], [1, 3])
    {'a:mean': 1.75, 'clock:unique': 7, 'clock:unique_1': 8}
    """
    keys = dict.fromkeys(chain.from_iterable(chunks))
    merged: dict[str, Any] = {}
    for key in keys:
        having = [index for index, metrics in enumerate(chunks) if key in metrics]
        values = [chunks[index][key] for index in having]
        kept = _reduced(key, values, [weights[index] for index in having])
        merged.update(zip(_names(key, keys), kept, strict=False))
    return merged


def _stands_alone(metric: tuple[str, Any]) -> bool:
    """Return True if the metric of a call's only chunk needs no reduction to be the metric of the call."""
    key, value = metric
    return type(value) is float and key.partition(":")[2] not in _NEW_FOR_ONE


def _reduced(key: str, values: list[Any], weights: list[int]) -> list[Any]:
    """Return a list with the reduced value, or the values themselves if the key has no reduction for them."""
    _, _, name = key.partition(":")
    reduce = _REDUCTIONS.get(name)
    if reduce is None:
        return values
    try:
        with np.errstate(all="ignore"):
            return [reduce(values, weights)]
    except Exception:  # noqa: BLE001  # a bad metric must not fail the whole result
        return values


def _names(key: str, taken: Mapping[str, object]) -> Iterator[str]:
    yield key
    for number in count(1):
        name = f"{key}_{number}"
        if name not in taken:
            yield name


def _mean(values: list[Any], weights: list[int]) -> Any:
    return np.average(values, weights=weights if any(weights) else None)


def _hash2(values: list[Any], _: list[int]) -> int:
    return sum(int(value) & _MASK for value in values) & _MASK


def _plain(reduced: Any) -> Any:
    """Return a Python number for a numpy number. An int too large for numpy is a Python int already."""
    return reduced.item() if isinstance(reduced, np.generic) else reduced


_NEW_FOR_ONE: Final = frozenset({"slack", "hash2"})
_REDUCTIONS: Final[Mapping[str, Callable[[list[Any], list[int]], Any]]] = {
    "mean": lambda values, weights: _plain(_mean(values, weights)),
    "sum": lambda values, _: _plain(np.sum(values)),
    "min": lambda values, _: _plain(np.min(values)),
    "max": lambda values, _: _plain(np.max(values)),
    "slack": lambda values, weights: _plain(np.max(values) - _mean(values, weights)),
    "hash2": _hash2,
}


# ------------------------------------------------------------------------------------------ reading


def weights_of(given: ForwardBackwardInput) -> list[TensorData | None] | None:
    """Return the weights of each datum of a cross-entropy, to compute its loss; None for another loss."""
    if given.loss_fn != "cross_entropy":
        return None
    return [datum.loss_fn_inputs.get("weights") for datum in given.data]


def read_with_loss(decode: Any, weights: Any, reply: Any, tree: Any) -> ForwardBackwardOutput:
    """Decode a result from a server that does not send the loss, and add the loss."""
    return add_loss(decode(reply, tree), weights)


def read_settled(
    decode: Any, expected: ExpectedOutputs, pledge: Reservation, used: TokensUsed, reply: Any, tree: Any
) -> ForwardBackwardOutput:
    """Decode a result, report its tokens to the limiters, and check the result."""
    output: ForwardBackwardOutput = decode(reply, tree)
    pledge.settle(used)  # even if the check fails, because the server has computed it
    return expected.check(output)


def read_result(name: str, model_id: str, kind: type[Any], _reply: Any, tree: Any) -> Any:
    """Return the result of a call that is answered in JSON, after checking its kind and its model."""
    check_kind(name, tree)
    result = wire_json.from_plain(tree, kind)
    if name.startswith("save_"):
        check_saved(result.path, getattr(result, "sampling_session_id", None))
    check_model(model_id, result)
    return result


def read_pass(reply: Any, tree: Any) -> ForwardBackwardOutput:
    """Return the output of one chunk, which comes as protobuf or as JSON."""
    if tree is None:
        return outputs.decode_forward_backward_output(reply.body)
    return wire_json.from_plain(tree, ForwardBackwardOutput)


def decode_pass(trained: int, reply: Any, tree: Any) -> ForwardBackwardOutput:
    """Return the output of a call that is one chunk, with metrics reduced like those of several chunks."""
    return merge_pass(trained, [read_pass(reply, tree)])


def merge_pass(trained: int, outputs: list[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Merge the outputs of the chunks of a pass, and add `loss:mean` over its `trained` tokens."""
    return add_mean_loss(merge_outputs(outputs), trained)
