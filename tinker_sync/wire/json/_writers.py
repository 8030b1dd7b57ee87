"""Values to trees: what of a value leaves, and in which form.

Chosen by the value's class alone. A writer answers with exact types that every JSON writer takes, arrays
apart, or raises `Unfit`; it never writes something else in place of what it cannot.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
from cattrs import Converter

from tinker_sync.types import Datum, SampledSequence, SampleResponse, TensorData
from tinker_sync.types._model import Model
from tinker_sync.types._moment import format_moment
from tinker_sync.wire.json._arrays import (
    array_out,
    sample_response_out,
    sampled_sequence_out,
    tensor_out,
)
from tinker_sync.wire.json._unfit import each, unfit

Writer = Callable[[Any], Any]

_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
_TEXT = frozenset({str})
_WITH_FLOATS = _AS_THEY_ARE | {float}


class Writers:
    """The writers of one converter.

    Args:
        converter: the one to teach.
        answers: whether NaN and infinities leave as null. In a request they are refused.
    """

    def __init__(self, converter: Converter, *, answers: bool) -> None:
        self._write = converter.unstructure
        self._converter = converter
        self._answers = answers
        # The first that fits is taken.
        self._table: tuple[tuple[type | tuple[type, ...], Writer], ...] = (
            (Enum, lambda member: self._write(member.value)),
            ((bool, type(None)), lambda value: value),
            (str, str.__str__),
            (int, int.__int__),
            (float, self.number),
            (TensorData, lambda tensor: self.mapping(tensor_out(tensor))),
            (SampledSequence, lambda sequence: self.mapping(sampled_sequence_out(sequence))),
            (SampleResponse, lambda response: self.mapping(sample_response_out(response))),
            (Datum, self.datum),
            (Model, self.model),
            (Mapping, self.mapping),
            ((list, tuple, range), self.list),
            (np.ndarray, lambda array: array_out(array, nulls=answers)),
            (np.floating, lambda number: self.number(float(number))),
            ((np.integer, np.bool_), lambda number: number.item()),
            (datetime, format_moment),
            ((date, time), lambda moment: moment.isoformat()),
            ((bytes, bytearray), _text_of),
            ((UUID, Decimal, PurePath), str),
            (object, _refuse),
        )

    def register(self) -> None:
        """Teach the converter."""
        self._converter.register_unstructure_hook_factory(lambda _: True, self._writer_for)
        # cattrs looks for these two, and for what inherits from them, before it asks any factory.
        for kind in (str, bytes):
            self._converter.register_unstructure_hook(
                kind, lambda value: self._writer_for(type(value))(value)
            )

    def _writer_for(self, kind: type) -> Writer:
        return next(writer for base, writer in self._table if issubclass(kind, base))

    def number(self, number: float) -> float | None:
        """A float, if JSON has it."""
        if math.isfinite(number):
            return float.__float__(number)
        if self._answers:
            return None
        raise unfit("expected a number that JSON has", float.__float__(number))

    def mapping(self, mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        """A mapping under the names JSON has for its keys."""
        return self._written(dict(_named(mapping)), self._write)

    def list(self, items: Iterable[Any]) -> Any:
        """A list or tuple itself, if it may leave as it is; else a list."""
        items = items if type(items) in (list, tuple) else [*items]
        kinds = set(map(type, items))
        # Long lists hold plain numbers or texts. They are looked at, not copied.
        if kinds <= _AS_THEY_ARE or (kinds <= _WITH_FLOATS and all(map(_is_finite, items))):
            return items
        return [written for _, written in each(enumerate(items), self._write)]

    def model(self, model: Model) -> dict[Any, Any]:
        """The fields a model shows. None stands for absent in a declared field, and only there."""
        given = {name: value for name, value in model._fields_out().items() if value is not None}
        return self._written(given, self._declared)

    def _declared(self, value: Any) -> Any:
        return _base64(value) if isinstance(value, bytes) else self._write(value)

    @staticmethod
    def _written(given: dict[Any, Any], write: Writer) -> dict[Any, Any]:
        """The same dict, its values written; most of most requests may leave as they are."""
        others = [(name, value) for name, value in given.items() if type(value) not in _AS_THEY_ARE]
        given.update(each(others, write))
        return given

    def datum(self, datum: Datum) -> dict[Any, Any]:
        """The fields of a datum that JSON bodies carry."""
        if datum.model_input_spans is not None or datum.loss_fn_input_spans is not None:
            raise unfit("has provenance spans, which only protobuf bodies carry")
        return self.mapping({"model_input": datum.model_input, "loss_fn_inputs": datum.loss_fn_inputs})


def _is_finite(value: Any) -> bool:
    return type(value) is not float or math.isfinite(value)


def _refuse(value: Any) -> Any:
    raise unfit("expected something JSON has: text, numbers, true, false, null, lists, mappings", value)


def _base64(octets: bytes) -> str:
    return base64.b64encode(octets).decode("ascii")


def _text_of(octets: bytes | bytearray) -> str:
    """Bytes amid free-form values: only text has a form that everybody reads the same."""
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError:
        pass
    raise unfit("expected text; these bytes are not UTF-8", octets)


def _named(mapping: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    if set(map(type, mapping)) <= _TEXT:
        return mapping.items()
    named: dict[str, Any] = {}
    for key, value in mapping.items():
        name = _name(key)
        if name in named:
            raise unfit(f"two keys are both written {name!r}")
        named[name] = value
    return named.items()


def _name(key: Any) -> str:
    """A key as the standard library writes it."""
    key = key.value if isinstance(key, Enum) else key
    if isinstance(key, str):
        return str.__str__(key)
    if key is None:
        return "null"
    if isinstance(key, (bool, np.bool_)):
        return "true" if key else "false"
    if isinstance(key, (int, np.integer)):
        return str(int(key))
    if isinstance(key, float) and math.isfinite(key):
        return float.__repr__(key)
    raise unfit("expected keys that are text or numbers", key)
