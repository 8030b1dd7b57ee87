"""`Datum`, one training example, and the spans that state the origin (provenance) of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import attrs

from tinker_sync._base.numpy import AnyArray, is_array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import (
    are_finite,
    are_natural,
    array_like,
    array_of_torch,
    count_nonzero,
    first,
    is_finite,
    is_torch,
    least_of,
    pack_list,
    place,
    wire_array,
)
from tinker_sync.types._checks import in_range
from tinker_sync.types._model import AsDataclass, Model, model
from tinker_sync.types._structured import is_foreign, model_from, refuse_all
from tinker_sync.types.model_input import EncodedTextChunk, ModelInput
from tinker_sync.types.tensor_data import TensorData, not_tensors

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt
    import torch
    from typing_extensions import Self

    from tinker_sync.types.scalars import TensorDtype

__all__ = [
    "Datum",
    "LossFnInputs",
    "LossFnOutput",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "SampledProvenanceSpan",
]

LossFnInputs: TypeAlias = dict[str, TensorData]
"""The input tensors of a loss, by name."""

LossFnOutput: TypeAlias = dict[str, TensorData]
"""The output tensors of a loss for one datum, by name."""

_KNOWN_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""The dtypes of lists under known names; under other names the numbers decide."""

_PER_TOKEN = tuple(name for name in _KNOWN_DTYPES if name != "target_tokens")
_ONE_FOR_ALL = ("clip_low_threshold", "clip_high_threshold")
"""The inputs in which one value may stand for all tokens."""
_FINITE = ("weights", "advantages", "logprobs")
_SPARSE_FROM_TORCH = ("target_tokens", "weights")


def _refuse_no_id(span: object, _: object, sequence_id: str) -> None:
    if not sequence_id:
        kind = type(span).__name__
        raise InvalidInputError(f"{kind}.sequence_id: expected the id of a sampled sequence, got ''")


@model
class _Span(AsDataclass, Model):
    sequence_id: str = attrs.field(validator=_refuse_no_id)
    offset: int = attrs.field(default=0, validator=in_range(ge=0))
    length: int = attrs.field(validator=in_range(ge=0))


@model
class PromptProvenanceSpan(_Span):
    """The origin of `length` tokens: the prompt of the sampled sequence `sequence_id`, from `offset` on.

    >>> PromptProvenanceSpan(sequence_id="seq-1", length=12).offset
    0
    """


@model
class SampledProvenanceSpan(_Span):
    """The origin of `length` tokens: the sampled sequence `sequence_id` itself, from `offset` on.

    >>> SampledProvenanceSpan(sequence_id="seq-1", offset=2, length=5).length
    5
    """


ProvenanceSpan: TypeAlias = PromptProvenanceSpan | SampledProvenanceSpan

ProvenanceSpans: TypeAlias = list[ProvenanceSpan]
"""The spans of one field of a datum, in order and without gaps."""


def _tensors(given: Any) -> dict[str, TensorData]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"Datum.loss_fn_inputs: expected a mapping of names to tensors, got {type(given).__name__}"
        )
    return {
        name: (_tensor_of_list if type(value) is list else _tensor)(name, value)
        for name, value in given.items()
    }


def _tensor_of_list(name: str, values: list[Any]) -> TensorData:
    dtype = _KNOWN_DTYPES.get(name)
    packed = None if dtype is None else pack_list(values, dtype)
    if dtype is None or packed is None:
        return _tensor(name, values)
    return TensorData._wrap(packed, dtype, [len(values)])


def _tensor(name: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    if not isinstance(name, str):
        raise TypeError(f"Datum.loss_fn_inputs: expected names in text, got {name!r}")
    where = f"loss_fn_inputs[{name!r}]"
    # Whole floats are exact targets; a fraction would become another token and is refused.
    dtype: TensorDtype | None = "int64" if name == "target_tokens" else None
    if is_array(value):  # first, because training loops use arrays
        return TensorData._of(wire_array(value, where, dtype))
    if isinstance(value, Mapping) or is_foreign(TensorData, value):
        return model_from(TensorData, value, where)
    if isinstance(value, (int, float, np.generic)):
        raise TypeError(
            f"{where}: expected a list, numpy array or torch tensor, got one {type(value).__name__}"
        )
    if is_torch(value):
        values = wire_array(array_of_torch(value, where), where, dtype)
        if name in _SPARSE_FROM_TORCH:
            return TensorData.from_numpy_sparse(values)
        return TensorData._of(values)
    array = array_like(value, where)
    if array is None:
        array, dtype = value, _KNOWN_DTYPES.get(name)
    return TensorData._of(wire_array(array, where, dtype))


def _spans(given: Any) -> ProvenanceSpans | None:
    if given is None:
        return None
    spans = list(given)
    for index, span in enumerate(spans):
        for kind in (PromptProvenanceSpan, SampledProvenanceSpan):
            if is_foreign(kind, span):
                spans[index] = span = model_from(kind, span)  # noqa: PLW2901
        if not isinstance(span, (PromptProvenanceSpan, SampledProvenanceSpan)):
            raise TypeError(
                f"Datum: span {index} must be a PromptProvenanceSpan or SampledProvenanceSpan, "
                f"got {type(span).__name__}"
            )
    return spans


@model(kw_only=False)
class Datum(AsDataclass, Model):
    """One training example: the model's input and the inputs of the loss.

    Lists, tuples, ranges, numpy arrays and torch tensors become `TensorData`. An array that already has the
    dtype in which it is sent is kept, not copied; a torch matrix of targets or weights becomes sparse if that
    is smaller. Position i of `model_input` predicts `target_tokens[i]`. A datum has spans, which state the
    origin of tokens, for both `model_input` and `target_tokens`, or for neither.

    Raises:
        TypeError: an input is one number or text, or a span is of another class.
        InvalidInputError: a value does not fit its dtype, or the rows differ in length.

    >>> datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]})
    >>> datum.loss_fn_inputs["weights"]
    TensorData(data=[0.0, 1.0, 1.0], dtype='float32', shape=[3])
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = attrs.field(factory=dict, converter=_tensors)
    model_input_spans: ProvenanceSpans | None = attrs.field(default=None, converter=_spans)
    """The spans that cover `model_input`."""
    loss_fn_input_spans: ProvenanceSpans | None = attrs.field(default=None, converter=_spans)
    """The spans that cover `target_tokens`."""

    if TYPE_CHECKING:  # for type checkers: the constructor accepts more types than the fields hold

        def __init__(
            self,
            model_input: ModelInput,
            loss_fn_inputs: Mapping[str, TensorData | Sequence[Any] | npt.ArrayLike | torch.Tensor] = ...,
            model_input_spans: Sequence[ProvenanceSpan] | None = None,
            loss_fn_input_spans: Sequence[ProvenanceSpan] | None = None,
        ) -> None: ...

    def __attrs_post_init__(self) -> None:
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise AssertionError(
                "Datum: provenance comes in pairs; give model_input_spans and loss_fn_input_spans, or neither"
            )

    @property
    def trained_tokens(self) -> list[int]:
        """The target tokens that the loss counts: those whose weight is not 0.

        Without `weights` the `advantages` decide (a scalar for all targets); without either, all count.

        Raises:
            InvalidInputError: the number of weights or advantages does not fit the targets.

        >>> Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1]}).trained_tokens
        [3]
        """
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is None:
            return []
        tokens = targets.to_numpy()
        factors = self.loss_fn_inputs.get("weights", self.loss_fn_inputs.get("advantages"))
        if factors is not None and factors._numpy.ndim == 0:
            tokens = tokens if factors._numpy else tokens.reshape(-1)[:0]
        elif factors is not None:
            counts = factors.to_numpy().reshape(-1) != 0
            rows = tokens.reshape(len(counts), -1) if len(counts) and tokens.size % len(counts) == 0 else None
            if rows is None or not _may_have_length(targets, len(counts)):
                raise InvalidInputError(
                    f"trained_tokens: there are {tokens.size} targets and {len(counts)} weights or advantages"
                )
            tokens = rows[counts]
        trained: list[int] = tokens.reshape(-1).tolist()
        return trained

    def with_provenance(
        self, model_input: Sequence[ProvenanceSpan], loss_fn_inputs: Sequence[ProvenanceSpan]
    ) -> Self:
        """Return a copy of the datum with the origin (provenance) of its tokens.

        Args:
            model_input: spans that cover `model_input`.
            loss_fn_inputs: spans that cover `target_tokens`.

        Raises:
            InvalidInputError: the lengths of the spans do not add up to the length of their field, or the
                length of `model_input` is not known. Spans of a matrix of targets are not checked.

        >>> datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        >>> run = SampledProvenanceSpan(sequence_id="seq-1", length=2)
        >>> datum.with_provenance(model_input=[run], loss_fn_inputs=[run]).model_input_spans == [run]
        True
        """
        _refuse_gaps("with_provenance(model_input)", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.shape is not None and len(targets.shape) == 1:
            _refuse_gaps("with_provenance(loss_fn_inputs)", loss_fn_inputs, targets.shape[0])
        return self._evolved({"model_input_spans": model_input, "loss_fn_input_spans": loss_fn_inputs})

    def validate(self, path: str = "datum") -> None:
        """Check the datum without sending it. One error lists the problems, at most one of a kind per input.

        Args:
            path: the name of this datum in error messages.

        Raises:
            InvalidInputError: `problems` lists each problem with its path, such as
                ``data[3].loss_fn_inputs['weights'][17]: expected a finite number, got nan``.

        >>> Datum(ModelInput.empty()).validate("data[3]")
        Traceback (most recent call last):
            ...
        tinker_sync.errors.InvalidInputError: data[3].model_input: is empty
        """
        refuse_all(self.problems(path))

    def problems(self, path: str = "datum") -> list[str]:
        """Return the problems that `validate` would report; an empty list if it finds none.

        >>> Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3, 4]}).problems()
        ["datum.loss_fn_inputs['target_tokens']: has length 3, model_input has 2"]
        """
        return [path + problem for problem in self._problems()]

    def _problems(self) -> Iterator[str]:
        """Yield each problem as a text that begins with its place in the datum."""
        prompt, inputs = self.model_input, self.loss_fn_inputs
        length = prompt.known_length()
        if length == 0:
            yield ".model_input: is empty"
        for problem in prompt._problems():
            yield f".model_input{problem}"
        if unfit := not_tensors(inputs):
            yield from unfit
            return
        targets = inputs.get("target_tokens")
        rows = None if targets is None else _rows(targets)
        if targets is not None:
            if length and rows != length and not _may_have_length(targets, length):
                yield f".loss_fn_inputs['target_tokens']: has length {rows}, model_input has {length}"
            if targets._numpy.size and least_of(targets._numpy) < 0:
                yield from self._negative_targets(targets._numpy)
        for name, tensor in inputs.items():
            fits = tensor._crow is None and tensor._numpy.shape[:1] == (rows,)
            if not fits and rows is not None and not _may_stand_for(name, tensor, rows):
                yield f".loss_fn_inputs[{name!r}]: has length {_rows(tensor)}, target_tokens has {rows}"
            if name in _FINITE and not is_finite(tensor._numpy):
                yield _unfinite_problem(tensor, f".loss_fn_inputs[{name!r}]")
        yield from _span_problems(self.model_input_spans, length, ".model_input_spans")
        flat = targets is not None and targets._numpy.ndim == 1 and not targets.is_sparse
        yield from _span_problems(self.loss_fn_input_spans, rows if flat else None, ".loss_fn_input_spans")

    def _negative_targets(self, tokens: AnyArray) -> Iterator[str]:
        """Yield one problem if the loss counts a negative target.

        A target may be negative if `weights` have the shape of the targets, and its weight is 0. Many
        programs use -100 there.
        """
        counted = tokens < 0
        weights = self.loss_fn_inputs.get("weights")
        if weights is not None and weights._numpy.shape == counted.shape:
            counted &= weights._numpy != 0
        if counted.any():
            least = int(tokens[counted].min())
            where = place(".loss_fn_inputs['target_tokens']", counted & (tokens == least))
            yield f"{where}: expected 0 or more, got {least}; weights of 0 leave tokens out of the loss"


def are_surely_valid(data: Sequence[Datum], needed: Set[str]) -> bool:
    """Return True if all data have the needed inputs and no problem, False if a full check is necessary.

    This quick check covers data of the usual form: text, with dense inputs of the same length. It checks the
    values of all data together.
    """
    ids: list[AnyArray] = []
    targets: list[AnyArray] = []
    reals: list[AnyArray] = []
    checked = {"target_tokens": targets, **dict.fromkeys(_FINITE, reals)}
    for datum in data:
        if not (needed <= datum.loss_fn_inputs.keys() and _gather(datum, ids, checked)):
            return False
    return (
        are_natural(ids)
        and are_finite(reals)
        and (are_natural(targets) or not any(map(_has_negative_target, data)))
    )


def _has_negative_target(datum: Datum) -> bool:
    """Return True if a target that the loss counts is negative."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    return targets is not None and any(datum._negative_targets(targets._numpy))


def _gather(datum: Datum, ids: list[AnyArray], checked: Mapping[str, list[AnyArray]]) -> bool:
    """Add the arrays of a datum whose values are still to be checked: tokens to `ids`, inputs to `checked`.

    Return False for a datum of an unusual form. Tokens that are not an array are checked at once: return
    False if one is negative.
    """
    chunks = datum.model_input.chunks
    if len(chunks) != 1 or datum.model_input_spans is not None or type(chunks[0]) is not EncodedTextChunk:
        return False
    chunk = chunks[0]
    tokens = chunk.tokens if chunk._packed is None else None
    if isinstance(tokens, np.ndarray):
        ids.append(tokens)
    elif chunk._has_negative():
        return False
    length = chunk.length
    shape = (length,)
    for name, tensor in datum.loss_fn_inputs.items():
        values = tensor._numpy
        if values.shape != shape or tensor._crow is not None:
            return False
        if name in checked:
            checked[name].append(values)
    return length > 0


def count_trained(data: Sequence[Datum]) -> int:
    """Return the number of positions that a loss counts: those whose weight is not 0.

    Without `weights` the `advantages` decide; without either, every target counts. A scalar applies to all
    targets.
    """
    total = 0
    flat: list[AnyArray] = []
    for datum in data:
        inputs = datum.loss_fn_inputs
        factors = inputs.get("weights", inputs.get("advantages"))
        if factors is not None and factors._numpy.ndim:
            values = factors._numpy if factors._crow is None else factors.to_numpy()
            if values.ndim == 1:
                flat.append(values)
            else:
                total += int(np.count_nonzero(values.any(axis=-1)))
        elif (targets := inputs.get("target_tokens")) is not None and (factors is None or factors._numpy):
            total += _rows(targets) or 0
    return total + count_nonzero(flat)


def _may_stand_for(name: str, tensor: TensorData, rows: int) -> bool:
    """Return True if a tensor has a shape that the input `name` may have, given `rows` targets."""
    one = name in _ONE_FOR_ALL and _may_have_length(tensor, 1)
    return name not in _PER_TOKEN or one or _may_have_length(tensor, rows)


def _rows(tensor: TensorData) -> int | None:
    """Return the size of a tensor's first dimension; None for a scalar."""
    shape = tensor._numpy.shape if tensor._crow is None else tensor._effective_shape
    return shape[0] if shape else None


def _may_have_length(tensor: TensorData, length: int) -> bool:
    """Return True for a scalar, and for a tensor with `length` rows or `length` values."""
    shape = tensor._numpy.shape if tensor._crow is None else tensor._effective_shape
    return not shape or shape[0] == length or math.prod(shape) == length


def _unfinite_problem(tensor: TensorData, where: str) -> str:
    values = tensor._numpy
    bad = ~np.isfinite(values)
    at = place(where, bad)
    if tensor._crow is not None and tensor._col is not None:
        stored = int(np.argmax(bad))
        row = int(np.searchsorted(tensor._crow, stored, side="right")) - 1
        at = f"{where}[{row}][{int(tensor._col[stored])}]"
    return f"{at}: expected a finite number, got {first(values, bad)}"


def _span_problems(spans: Sequence[ProvenanceSpan] | None, length: int | None, where: str) -> Iterator[str]:
    if spans is None or length is None:
        return
    covered = sum(span.length for span in spans)
    if covered != length:
        yield f"{where}: cover {covered} positions of {length}"


def _refuse_gaps(where: str, spans: Sequence[ProvenanceSpan], length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise InvalidInputError(f"{where}: the runs cover {covered} positions, the field has {length}")
