"""The results of training calls: checked against their requests, and merged from the outputs of chunks.

Any thread may call the functions. All are pure, except `read_settled` and the check of shapes, which may log.
A result of the wrong size, or of another call or model, fails the call that waits for it.
`wire.adapt.check_response` checks samples. Metrics that cannot be reduced raise no error.

A metric key is `name:reduction` with exactly one colon. The reduction covers the chunks that have the key.
The weight of a chunk is the number of its outputs:

    mean            weighted mean; the plain mean if all weights are 0
    sum, min, max   sum, smallest and largest value
    slack           largest minus mean
    hash2           sum of the values without their fractions, modulo 2**64, an exact int
    unique          every value, see below

Three cases keep one value per chunk, as `unique` does: a key without exactly one colon, a reduction that is
not in this list, and values that cannot be reduced (a hash2 of infinity, text, None). The first value keeps
the key itself. Later values get `key_1`, `key_2` and so on, but never a name that is a key of a chunk. Keys
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
from functools import cache
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.log import Log
from tinker_sync._base.numpy import np
from tinker_sync.errors import WireError
from tinker_sync.types.datum import Datum
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput, Metrics
from tinker_sync.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_sync.wire.proto import outputs
else:  # it needs numpy
    outputs = LazyModule("tinker_sync.wire.proto.outputs")

_log = Log("tinker_sync.clients")

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
    """The shapes that the result of one request of a pass must fit.

    A result has one output for each datum. An output may have scores (log-probabilities) of the targets: one
    for each target, or, for targets of several dimensions, one for each row.

    Attributes:
        shapes: the shape of the targets of each datum. None stands for a datum without targets, or with
            sparse ones; its scores are not checked.
        whole: True if the scores of an output must cover every target; servers of older versions may leave
            out targets that have no weight.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    whole: bool

    @classmethod
    def of(cls, data: Sequence[Datum], *, whole: bool) -> ExpectedOutputs:
        """Return the shapes for a request with these data; `whole` as in the class."""
        return cls(tuple(map(_target_shape, data)), whole)

    def check(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Return the result `output` if it fits the data.

        The model has been trained by then, so a result that only has another form than expected is logged
        and returned.

        Raises:
            WireError: the number of outputs differs from that of the data, or the number of scores does not
                fit that of the targets.

        >>> expected = ExpectedOutputs(((2,),), whole=True)
        >>> expected.check(ForwardBackwardOutput("ArrayRecord", []))
        Traceback (most recent call last):
            ...
        tinker_sync.errors.WireError: loss_fn_outputs: expected 1, one for each datum, got 0
        """
        records = output.loss_fn_outputs
        if len(records) != len(self.shapes):
            raise WireError(
                f"expected {len(self.shapes)}, one for each datum, got {len(records)}", "loss_fn_outputs"
            )
        for index, (record, expected) in enumerate(zip(records, self.shapes, strict=True)):
            scores = record.get(_SCORES)
            if scores is None or expected is None or scores._effective_shape == expected:
                continue
            got = scores._effective_shape
            if self._fits(got, expected):  # perhaps flat
                continue
            if not self._fits(got[:1], expected[:1]):
                raise WireError(
                    f"expected {math.prod(expected)} values, one for each target, got {math.prod(got)}",
                    f"loss_fn_outputs[{index}].{_SCORES}",
                )
            _warn_of_shape(got[1:], expected[1:])
        return output

    def _fits(self, got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        count, most = math.prod(got), math.prod(expected)
        return count == most or (count < most and not self.whole)


def _target_shape(datum: Datum) -> tuple[int, ...] | None:
    targets = datum.loss_fn_inputs.get(_TARGETS)
    # A server may return scores for the stored elements of sparse targets only.
    return None if targets is None or targets._crow is not None else targets._numpy.shape


@cache  # once for each pair of forms, because each step has the same
def _warn_of_shape(got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    _log.warning(
        "a datum has targets of shape %s, its %s have shape %s",
        ["n", *expected],
        _SCORES,
        ["n", *got],
    )


def check_kind(name: str, tree: Any) -> None:
    """Refuse a result whose field `type` names another known kind of call. All saves are one kind.

    Args:
        name: the name of the call.
        tree: the parsed JSON of the result.

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

    `outputs` has at least one entry. The entries are in the order of the chunks.

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
    """Return the output of a call with the metric `loss:mean`: `loss:sum` divided by `trained`.

    An output that has a `loss:mean` from the server, or no `loss:sum`, stays as it is.

    Args:
        output: the output of the call.
        trained: the number of target tokens that the loss counts; with 0, the mean is that of one token.

    >>> add_mean_loss(ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 6.0}), 4).metrics
    {'loss:sum': 6.0, 'loss:mean': 1.5}
    >>> add_mean_loss(ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 0.0}), 0).metrics
    {'loss:sum': 0.0, 'loss:mean': 0.0}
    """
    metrics = output.metrics
    if "loss:sum" not in metrics or "loss:mean" in metrics:
        return output
    return output._with(metrics=Metrics({**metrics, "loss:mean": metrics["loss:sum"] / max(trained, 1)}))


def add_loss(
    output: ForwardBackwardOutput, weights: Sequence[TensorData | None] | None
) -> ForwardBackwardOutput:
    """Return the output with the metric `loss:sum`, computed here if the server does not send it.

    The loss is computed from the entries of `loss_fn_outputs`. If they lack the needed values, the output
    stays as it is.

    Args:
        output: the output of one chunk.
        weights: for a cross-entropy, the weights of each datum; an entry None stands for weights that are
            all 1. For another loss, None: the rows of `loss_fn_outputs` must then have `elementwise_loss`.

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
        kept = _reduce(key, values, [weights[index] for index in having])
        merged.update(zip(_names(key, keys), kept, strict=False))
    return merged


def _stands_alone(metric: tuple[str, Any]) -> bool:
    """Return True if a metric of the only chunk of a pass needs no reduction."""
    key, value = metric
    return type(value) is float and key.partition(":")[2] not in _NEW_FOR_ONE


def _reduce(key: str, values: list[Any], weights: list[int]) -> list[Any]:
    """Return a list with the reduced value, or `values` if no reduction is named or the reduction fails."""
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
    """Return the weights of each datum of a cross-entropy, for `add_loss`; None for another loss."""
    if given.loss_fn != "cross_entropy":
        return None
    return [datum.loss_fn_inputs.get("weights") for datum in given.data]


def read_with_loss(decode: Any, weights: Any, reply: Any, tree: Any) -> ForwardBackwardOutput:
    """Decode a result from a server that may not send the loss. Add the loss as `add_loss` does."""
    return add_loss(decode(reply, tree), weights)


def read_settled(
    decode: Any, expected: ExpectedOutputs, settle: Callable[[], object], reply: Any, tree: Any
) -> ForwardBackwardOutput:
    """Decode a result, call `settle`, and return the result if it fits the data.

    Raises:
        WireError: the result cannot be decoded, or does not fit the data.
    """
    output: ForwardBackwardOutput = decode(reply, tree)
    settle()  # even if the check fails, because the server has computed it
    return expected.check(output)


def read_result(name: str, model_id: str, kind: type[Any], _reply: Any, tree: Any) -> Any:
    """Return the result of a call that is answered in JSON, as the type `kind`, after a check of its content.

    Raises:
        WireError: the result does not have that type, belongs to another call or model, or is that of a save
            and names nothing that was saved.
    """
    check_kind(name, tree)
    result = wire_json.from_plain(tree, kind)
    if name.startswith("save_"):
        check_saved(result.path, getattr(result, "sampling_session_id", None))
    check_model(model_id, result)
    return result


def read_pass(reply: Any, tree: Any) -> ForwardBackwardOutput:
    """Return the output of one chunk, which comes as protobuf or as JSON.

    Args:
        reply: the answer.
        tree: the parsed JSON of the answer; None if it is protobuf.

    Raises:
        WireError: the answer does not have the form of an output.
    """
    if tree is None:
        return outputs.decode_forward_backward_output(reply.body)
    return wire_json.from_plain(tree, ForwardBackwardOutput)


def decode_pass(trained: int, reply: Any, tree: Any) -> ForwardBackwardOutput:
    """Decode the only chunk of a pass, and return the output of the pass as `merge_pass` does."""
    return merge_pass(trained, [read_pass(reply, tree)])


def merge_pass(trained: int, outputs: list[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Merge the outputs of the chunks of a pass, and add `loss:mean`; `trained` as in `add_mean_loss`."""
    return add_mean_loss(merge_outputs(outputs), trained)
