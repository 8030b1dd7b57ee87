"""Values as JSON trees, by their classes: one recursive function, without cattrs.

Tensors and samples make up nearly all bytes of a body, so their numbers stay arrays up to the backend. In
answers, null stands for NaN or an infinity, which JSON does not have: many servers write null for them.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import attrs

from tinker_sync._base.numpy import AnyArray, BoolArray, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import plain_array
from tinker_sync.types._model import Model
from tinker_sync.types._moment import format_moment
from tinker_sync.types._structured import Unfit, fields_of
from tinker_sync.wire.json._unfit import Steps

if TYPE_CHECKING:
    from tinker_sync.types import Datum, SampledSequence, SampleResponse, TensorData

_WRITTEN_AS_TEXT: Final = (("uuid", "UUID"), ("decimal", "Decimal"), ("pathlib", "PurePath"))
"""The classes whose values are written as text, by module.

If a module is not loaded, no value of its class exists.
"""
_AS_THEY_ARE: Final = frozenset({str, int, bool, type(None)})
_WITH_FLOATS: Final = _AS_THEY_ARE | {float}


class Writer:
    """A writer of trees for requests or, if `answers`, for the answers of a server.

    >>> from tinker_sync.types import LoraConfig
    >>> Writer(answers=False).write({"config": LoraConfig(rank=8), "n": None})["config"]["rank"]
    8
    """

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        self._writers: dict[type, Callable[[Any], Any]] = {}  # each is chosen when its class is first written
        # The first base class that fits counts.
        self._table: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (Enum, lambda member: self.write(member.value)),
            ((bool, type(None)), lambda value: value),
            (str, str.__str__),
            (int, int.__int__),
            (float, self.number),
            (Mapping, self.mapping),
            ((list, tuple, range), self.list),
            (datetime, format_moment),
            ((date, time), lambda moment: moment.isoformat()),
            ((bytes, bytearray), _text_of),
            (object, _refuse),
        )

    def write(self, value: Any) -> Any:
        """Return a value as a tree of dicts, lists, text, numbers and arrays.

        Raises:
            InvalidInputError: a value in it has no JSON form.
        """
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        writer = self._writers.get(kind)
        if writer is None:
            writer = self._writers[kind] = self._choose_writer(kind)
        return writer(value)

    def _choose_writer(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, Model):
            return self._model_writer(kind)
        table = [*self._of_numpy(), *self._table] if "numpy" in sys.modules else self._table
        if any(issubclass(kind, getattr(sys.modules.get(home), name, ())) for home, name in _WRITTEN_AS_TEXT):
            return str
        return next(writer for base, writer in table if issubclass(kind, base))

    def _of_numpy(self) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        yield np.ndarray, lambda array: array_out(array, nulls=self._answers)
        yield np.floating, lambda number: self.number(float(number))
        yield (np.integer, np.bool_), lambda number: number.item()

    def number(self, number: float) -> float | None:
        """Return a finite float. NaN and infinities become null in an answer and are refused in a request."""
        if math.isfinite(number):
            return float.__float__(number)
        if self._answers:
            return None
        raise Unfit("expected a number that JSON has", float.__float__(number))

    def mapping(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        """Return a mapping as a dict with its keys as text and its values in JSON form."""
        return {name: self.write(value) for name, value in _named(mapping).items()}

    def list(self, items: Any) -> Any:
        """Return a list or tuple itself if its items need no conversion, else a list of their JSON forms."""
        items = items if type(items) in (list, tuple) else [*items]
        # Long lists hold plain numbers or texts, so they are checked and not copied.
        if _AS_THEY_ARE.issuperset(map(type, items)):
            return items
        if _WITH_FLOATS.issuperset(map(type, items)) and all(map(_is_finite, items)):
            return items
        return [self.write(item) for item in items]

    def _model_writer(self, cls: type[Model]) -> Callable[[Any], dict[str, Any]]:
        """Return the function that converts a model to a dict, without declared fields that are None."""
        parts, octets, write = _parts_of(cls), _fields_of_bytes(cls), self.write
        plain, isfinite = _AS_THEY_ARE, math.isfinite

        def write_model(model: Any) -> dict[str, Any]:
            tree = {}
            for name, item in parts(model).items():
                if item is None:
                    continue
                kind = type(item)
                if kind in plain or (kind is float and isfinite(item)):
                    tree[name] = item
                elif name in octets:
                    tree[name] = base64.b64encode(item).decode("ascii")
                elif (written := write(item)) is not None:
                    tree[name] = written
            return tree

        return write_model


def _is_finite(value: Any) -> bool:
    return type(value) is not float or math.isfinite(value)


def _fields_of_bytes(cls: type) -> frozenset[str]:
    fields = fields_of(cls) if attrs.has(cls) else ()
    return frozenset(str(field.alias) for field in fields if field.type is bytes)


def _datum_out(datum: Datum) -> dict[str, Any]:
    if datum.model_input_spans is not None or datum.loss_fn_input_spans is not None:
        raise Unfit("has provenance spans, which only protobuf bodies carry")
    return {"model_input": datum.model_input, "loss_fn_inputs": datum.loss_fn_inputs}


def tensor_out(tensor: TensorData) -> dict[str, Any]:
    """Return the JSON fields of a tensor, with its values as a flat array."""
    return {
        "data": tensor._numpy.reshape(-1),
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "sparse_crow_indices": tensor._crow,
        "sparse_col_indices": tensor._col,
    }


def sampled_sequence_out(sequence: SampledSequence) -> dict[str, Any]:
    """Return the JSON fields of a sampled sequence, with its matrices as lists."""
    tokens, logprobs = sequence.tokens_np, sequence.logprobs_np
    return {
        "stop_reason": sequence.stop_reason,
        "sequence_id": sequence.sequence_id,
        "tokens": sequence.tokens if tokens is None else tokens,
        "logprobs": sequence.logprobs if logprobs is None else logprobs,
        "topk_logprobs": sequence.topk_logprobs,
    }


def sample_response_out(response: SampleResponse) -> dict[str, Any]:
    logprobs = response.prompt_logprobs_np
    return {
        "sequences": response.sequences,
        "prompt_logprobs": response.prompt_logprobs if logprobs is None else logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
        "target_prompt_logprobs": response.target_prompt_logprobs,
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        "prompt_alt_tokens": response.prompt_alt_tokens,
        "type": "sample",
    }


_PARTS: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "TensorData": tensor_out,
    "SampledSequence": sampled_sequence_out,
    "SampleResponse": sample_response_out,
    "Datum": _datum_out,
}
"""The functions that return the fields of models with arrays, under their JSON names."""


def _parts_of(cls: type) -> Callable[[Any], dict[str, Any]]:
    named = (base.__name__ for base in cls.__mro__)
    return next((_PARTS[name] for name in named if name in _PARTS), cls._fields_out)  # type: ignore[attr-defined]


def array_out(array: AnyArray, *, nulls: bool) -> Any:
    """Return an array as all JSON writers accept it: contiguous, native, of integers, booleans or float64.

    A float32 array is converted to float64, so that all writers write the same digits. With `nulls`, an array
    with NaN or infinities becomes a list with None in their place; otherwise they are refused. An array
    without dimensions becomes a number, and an empty one a list.
    """
    array = plain_array(array, "")
    if array.dtype.kind == "f":
        array = array.astype(np.float64, copy=False)
        odd = ~np.isfinite(array)
        if odd.any():
            return _with_nulls(array) if nulls else _refuse_odd_number(array, odd)
    elif array.dtype.kind not in "biu":
        raise Unfit("expected numbers", array)
    if array.ndim == 0 or array.size == 0:
        return array.tolist()
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _with_nulls(array: AnyArray) -> Any:
    boxed = array.astype(object)
    boxed[~np.isfinite(array)] = None
    return boxed.tolist()


def _refuse_odd_number(array: AnyArray, odd: BoolArray) -> Any:
    index = np.unravel_index(int(np.argmax(odd)), odd.shape)
    steps = tuple(int(step) for step in index)
    raise Unfit("expected a number that JSON has", float(array[index]), steps)


def problems_of(
    value: Any, write: Callable[[Any], Any], steps: Steps = ()
) -> Iterator[tuple[Steps, Exception]]:
    """Yield the errors for the parts of `value` that `write` refuses, each with its place.

    `steps` is the place of `value`.
    """
    try:
        items = _items(value)
        if items is None:
            write(value)
    except InvalidInputError as error:
        yield steps, error
        return
    for step, item in items or ():
        yield from problems_of(item, write, (*steps, step))


def _items(value: Any) -> Any:
    """Return the items of a container with their keys or indices; None for any other value."""
    if isinstance(value, Model):
        # Declared bytes are written as base64, which cannot fail.
        fields = _parts_of(type(value))(value)
        return [(name, part) for name, part in fields.items() if not isinstance(part, bytes)]
    if isinstance(value, Mapping):
        return _named(value).items()
    return enumerate(value) if isinstance(value, (list, tuple, range)) else None


def _refuse(value: Any) -> Any:
    raise Unfit("expected something JSON has: text, numbers, true, false, null, lists, mappings", value)


def _text_of(octets: bytes | bytearray) -> str:
    """Return bytes of a free-form value as UTF-8 text, the only form that all readers understand."""
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError:
        pass
    raise Unfit("expected text; these bytes are not UTF-8", octets)


def _named(mapping: Mapping[Any, Any]) -> Mapping[str, Any]:
    if set(map(type, mapping)) <= {str}:
        return mapping
    named: dict[str, Any] = {}
    for key, value in mapping.items():
        name = _name(key)
        if name in named:
            raise Unfit(f"two keys are both written {name!r}")
        named[name] = value
    return named


def _name(key: Any) -> str:
    """Return the text of a mapping's key, as the module `json` of the standard library writes it.

    An enum or a numpy integer is written like its value. Other keys are refused.
    """
    key = key.value if isinstance(key, Enum) else key
    if isinstance(key, str):
        return str.__str__(key)
    if key is None:
        return "null"
    if isinstance(key, bool):
        return "true" if key else "false"
    if isinstance(key, int):
        return str(int(key))
    if isinstance(key, float) and math.isfinite(key):
        return float.__repr__(key)
    if "numpy" in sys.modules and isinstance(key, (np.bool_, np.integer)):
        return _name(key.item())
    raise Unfit("expected keys that are text or numbers", key)
