"""Many chunk outputs into one, metrics included. Pure; any thread; nothing a server puts into metrics makes
it raise.

A metric key is `name:reduction` with exactly one colon. Over the chunks that have the key, with the number of
outputs of a chunk as its weight:

    mean            weighted mean; the plain one where all weights are 0
    sum, min, max   what they say
    slack           largest minus mean
    hash2           sum of the whole parts modulo 2**64, an exact int
    unique          every value, see below

A key without exactly one colon, a reduction this list does not have, and values that cannot be reduced (a
hash2 of infinity, text, None) are kept per chunk, as `unique` is: the first value under the key itself, later
ones under `key_1`, `key_2` and so on, passing over names that a chunk uses itself. Keys come in the order in
which the chunks, one after the other, first have them. None is lost: those of later chunks count as much as
those of the first.

`loss` and `loss:sum` may both be there and keep to themselves. `loss:sum` is the loss of the whole call and
takes precedence wherever one number is asked for; a bare `loss` does not say how to put chunks together, so
it stays per chunk (`loss`, `loss_1`) and never becomes or replaces `loss:sum`. With a single chunk a bare
`loss` is the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, Final

from tinker_sync._numpy import np
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardOutput

_MASK: Final = 2**64 - 1
_LOSS: Final = "loss:sum"


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """The output of a call from those of its chunks, at least one, in order.

    >>> first = ForwardBackwardOutput("ArrayRecord", [{}], {"loss:sum": 1.5})
    >>> second = ForwardBackwardOutput("ArrayRecord", [{}, {}], {"loss:sum": 2.0, "loss": 0.1})
    >>> merged = merge_outputs([first, second])
    >>> len(merged.loss_fn_outputs), merged.metrics
    (3, {'loss:sum': 3.5, 'loss': 0.1})
    """
    assert outputs, "nothing to merge"  # noqa: S101
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=list(chain.from_iterable(output.loss_fn_outputs for output in outputs)),
        metrics=merge_metrics(
            [output.metrics for output in outputs], [len(output.loss_fn_outputs) for output in outputs]
        ),
    )


def add_mean_loss(output: ForwardBackwardOutput, trained: int) -> ForwardBackwardOutput:
    """Return the output of a call with `loss:mean`, its `loss:sum` for each token that the loss counts.

    A `loss:mean` that the server sends stays.

    >>> add_mean_loss(ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 6.0}), 4).metrics
    {'loss:sum': 6.0, 'loss:mean': 1.5}
    """
    metrics = output.metrics
    if not trained or "loss:sum" not in metrics or "loss:mean" in metrics:
        return output
    return output.model_copy(update={"metrics": {**metrics, "loss:mean": metrics["loss:sum"] / trained}})


def add_loss(
    output: ForwardBackwardOutput, weights: Sequence[TensorData | None] | None
) -> ForwardBackwardOutput:
    """Add `loss:sum` to an output whose server gives no such metric, where the outputs tell it.

    Args:
        output: the output of one chunk.
        weights: the weights of each datum of a cross-entropy, None where all are 1; None for another loss,
            whose outputs have to contain its elements.

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
        # A token without weight counts nothing, whatever its score: it may be infinite.
        counted = np.ones(len(scores)) if weight is None else weight.to_numpy().reshape(-1)
        total -= float(np.sum(np.where(counted != 0, scores, 0.0) * counted))
    return total


def merge_metrics(chunks: Sequence[Mapping[str, Any]], weights: Sequence[int]) -> dict[str, Any]:
    """The metrics of a call from those of its chunks.

    Args:
        chunks: the metrics of each chunk.
        weights: how many outputs each chunk has.

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


def _reduced(key: str, values: list[Any], weights: list[int]) -> list[Any]:
    """One value where the key says how to get it, else the values themselves."""
    _, _, name = key.partition(":")
    reduce = _REDUCTIONS.get(name)
    if reduce is None:
        return values
    try:
        with np.errstate(all="ignore"):
            return [reduce(values, weights)]
    except Exception:  # noqa: BLE001  # a metric is never worth the result it came with
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
    """A Python number of numpy's; ints that numpy has no type for are Python's already."""
    return reduced.item() if isinstance(reduced, np.generic) else reduced


_REDUCTIONS: Final[Mapping[str, Callable[[list[Any], list[int]], Any]]] = {
    "mean": lambda values, weights: _plain(_mean(values, weights)),
    "sum": lambda values, _: _plain(np.sum(values)),
    "min": lambda values, _: _plain(np.min(values)),
    "max": lambda values, _: _plain(np.max(values)),
    "slack": lambda values, weights: _plain(np.max(values) - _mean(values, weights)),
    "hash2": _hash2,
}
