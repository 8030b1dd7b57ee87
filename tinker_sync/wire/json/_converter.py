"""The cattrs converters between parsed JSON and the types of this package.

cattrs generates the functions for models. Hooks, which are functions that cattrs calls, handle arrays, null
and NaN, unions (their errors list the known tags), and free-form values. A free-form value has no annotation,
so its class determines its JSON form.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from enum import Enum
from functools import cache
from typing import Any, cast, get_args

import attrs
from cattrs import Converter, ForbiddenExtraKeysError, override
from cattrs.gen import make_dict_structure_fn_from_attrs, make_dict_unstructure_fn_from_attrs

from tinker_sync import types
from tinker_sync._base.numpy import np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import _convert, _structured
from tinker_sync.types._model import Model
from tinker_sync.types._moment import format_moment
from tinker_sync.types._structured import ABSENT, Unfit
from tinker_sync.types.scalars import TensorDtype
from tinker_sync.wire.json._arrays import (
    array_out,
    float32_in,
    numbers_in,
    sample_response_out,
    sampled_sequence_out,
    tensor_out,
    tokens_in,
    topk_in,
)
from tinker_sync.wire.json._unfit import Steps, at

Unknown = Callable[[type, set[str]], object]
"""A function that is called with a class and the unknown fields of an object that is read as this class."""


def make_converter(*, answers: bool, unknown: Unknown | None = None) -> Converter:
    """Return the converter for answers, or for requests.

    Args:
        answers: True for answers: unknown fields are ignored, and null stands for NaN and infinities. In a
            request both are refused.
        unknown: called with the unknown fields of an object. If it is given, unknown fields are ignored in
            requests too.

    >>> from tinker_sync.types import LoraConfig
    >>> make_converter(answers=False).unstructure(LoraConfig(rank=8))["rank"]
    8
    """
    reading = _Reading(answers, unknown)
    reading.converter = converter = _convert.make_converter(
        reading.list_in, reading.mapping_in, reading.model_of, reading.union_of
    )
    converter.register_structure_hook(int, _whole_number)
    converter.register_structure_hook_func(_is_tensor, reading.tensor)
    _Writing(converter, answers)
    return converter


# ------------------------------------------------------------------------------------------------- reading


def _whole_number(tree: Any, _: Any) -> Any:
    # The parser returns an integer of more than 64 bits as a float, without its last digits.
    if isinstance(tree, float) and abs(tree) >= 2**63:
        raise Unfit("expected a whole number", tree)
    return _convert.SCALARS[int](tree)


def _object(tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return tree
    raise Unfit("expected an object", tree)


def _list(tree: Any) -> list[Any]:
    if isinstance(tree, list):
        return tree
    raise Unfit("expected a list", tree)


def _array(name: str, read: Callable[[Any], Any]) -> Any:
    return override(rename=name, struct_hook=lambda tree, _: read(tree))


_SPECIAL: dict[tuple[str, str], Any] = {
    # The model's own converter reads these.
    ("EncodedTextChunk", "tokens"): override(struct_hook=lambda tree, _: _list(tree)),
    ("SamplingParams", "stop"): override(struct_hook=lambda tree, _: tree),
    ("ForwardBackwardInput", "loss_fn_config"): override(struct_hook=lambda tree, _: tree),
    # Only protobuf bodies carry provenance.
    ("Datum", "model_input_spans"): override(omit=True),
    ("Datum", "loss_fn_input_spans"): override(omit=True),
    ("SampledSequence", "_tokens"): _array("tokens", tokens_in),
    ("SampledSequence", "_logprobs"): _array("logprobs", float32_in),
    ("SampledSequence", "topk_logprobs_np"): _array("topk_logprobs", topk_in),
    ("SampleResponse", "_prompt_logprobs"): _array("prompt_logprobs", float32_in),
    ("SampleResponse", "topk_prompt_logprobs_np"): _array("topk_prompt_logprobs", topk_in),
}
"""The fields whose JSON name or JSON form differs from their declaration."""

_OPTIM_NAMES = ("optim_params", "adam_params", "optimizer_params")
_SIZES: Any = list[int] | None


def _is_tensor(kind: Any) -> bool:
    return _structured.is_model(kind) and kind.__name__ == "TensorData"


class _Reading:
    """The cattrs hooks that convert parsed JSON to values of this package's types."""

    converter: Converter

    def __init__(self, answers: bool, unknown: Unknown | None) -> None:
        self._answers = answers
        self._unknown = unknown

    def list_in(self, tree: Any, kind: Any) -> list[Any]:
        """Return the unconverted items of a list of type `kind`. In an answer, a null float becomes NaN."""
        items = _list(tree)
        if self._answers and get_args(kind)[0] is float:
            return [math.nan if item is None else item for item in items]
        return items

    def mapping_in(self, tree: Any, kind: Any) -> dict[str, Any]:
        """Return the unconverted items of a dict of type `kind`. In an answer, a null float becomes NaN."""
        items = _object(tree)
        if self._answers and get_args(kind)[1] is float:
            return {name: math.nan if item is None else item for name, item in items.items()}
        return items

    def model_of(self, cls: Any) -> _convert.Hook:
        """Return the hook that reads JSON objects as a model."""
        if cls.__open__:
            return lambda tree, _: cls(**_object(tree))
        fields = _structured.fields_of(cls)
        overrides: dict[str, Any] = {each.name: _override(cls, each.name) for each in fields}
        # `make_dict_structure_fn` would take an `AsDataclass` for a dataclass, with other field names.
        structure = make_dict_structure_fn_from_attrs(
            [*fields],
            cls,
            self.converter,
            _cattrs_forbid_extra_keys=not (self._answers or cls.__response__ or self._unknown),
            _cattrs_use_linecache=False,
            **overrides,
        )
        known = {
            overrides[each.name].rename or each.name: each for each in fields if not overrides[each.name].omit
        }
        null_is_default = {name for name, each in known.items() if _null_is_default(each)}
        # A None is not sent, so a field without a default may be missing.
        if_absent = {
            name: None
            for name, each in known.items()
            if each.default is attrs.NOTHING and _takes_none(each.type)
        }

        def read(tree: Any, _: Any) -> Any:
            given = {**if_absent, **_object(tree)}
            if cls.__name__ == "OptimStepRequest":
                given = _one_name(given)
            if self._unknown is not None and (unknown := given.keys() - known.keys()):
                self._unknown(cls, unknown)
            for name in null_is_default:
                if name in given and given[name] is None:
                    del given[name]
            return structure(given, cls)

        return read

    def union_of(self, kind: Any) -> _convert.Hook:
        """Return the hook that reads one of several models, or null.

        The strategy of cattrs for tagged unions is not used, because it makes the functions of all members at
        once, and raises a bare KeyError for an unknown tag.
        """
        members = _structured.members_of(kind)
        tag_name, by_tag, open_member = _structured.union_table(members)
        by_fields = open_member is not None or len(by_tag) < len(members)
        expected = f"expected one of {', '.join(map(repr, by_tag))}"

        def read(tree: Any, _: Any) -> Any:
            if tree is None and _takes_none(kind):
                return None
            tag = _object(tree).get(tag_name, ABSENT)
            chosen = by_tag.get(tag) if isinstance(tag, str) else None
            if by_fields and self._unknown is not None and tag is ABSENT:
                chosen = max(members, key=lambda each: len(tree.keys() & set(_structured.field_names(each))))
            if by_fields and (chosen is None or self._unknown is None):
                return _structured.union_from(kind, tree)
            if chosen is not None:
                return self.converter.structure(tree, chosen)
            if tag is ABSENT:
                raise Unfit(f"is missing; {expected}", steps=(tag_name,))
            raise Unfit(expected, tag, steps=(tag_name,))

        return read

    def tensor(self, tree: Any, _: Any) -> types.TensorData:
        """Read a tensor. Its numbers become an array in one step."""
        given = _object(tree).get
        structure = self.converter.structure
        dtype = at("dtype", structure, given("dtype"), TensorDtype)
        arguments = {"dtype": dtype, "data": at("data", numbers_in, given("data"), dtype)}
        for name in ("shape", "sparse_crow_indices", "sparse_col_indices"):
            arguments[name] = at(name, structure, given(name), _SIZES)
        if unknown := tree.keys() - arguments.keys():
            if self._unknown is not None:
                self._unknown(types.TensorData, unknown)
            elif not self._answers:
                raise ForbiddenExtraKeysError("", types.TensorData, unknown)
        return types.TensorData(**arguments)


def _null_is_default(field: attrs.Attribute[Any]) -> bool:
    return field.default is None or (field.default is not attrs.NOTHING and not _takes_none(field.type))


def _override(cls: type, name: str) -> Any:
    return _SPECIAL.get((cls.__name__, name)) or override(omit=name.startswith("_"))


def _one_name(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `OptimStepRequest`, with the optimizer's settings under `optim_params`.

    `fields` must have them under exactly one of `optim_params`, `adam_params` and `optimizer_params`.
    """
    given = [name for name in _OPTIM_NAMES if fields.get(name) is not None]
    if len(given) != 1:
        raise Unfit(f"takes exactly one of optim_params, adam_params and optimizer_params, got {len(given)}")
    rest = {name: value for name, value in fields.items() if name not in _OPTIM_NAMES}
    return {**rest, "optim_params": fields[given[0]]}


def _takes_none(kind: Any) -> bool:
    return kind in (Any, object) or type(None) in get_args(kind)


# ------------------------------------------------------------------------------------------------- writing

_WRITTEN_AS_TEXT = (("uuid", "UUID"), ("decimal", "Decimal"), ("pathlib", "PurePath"))
"""The classes whose values are written as text, by module.

If a module is not loaded, no value of its class exists.
"""
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
_WITH_FLOATS = _AS_THEY_ARE | {float}


class _Writing:
    """The cattrs hooks that convert values to JSON trees: models by annotation, free-form values by class."""

    def __init__(self, converter: Converter, answers: bool) -> None:
        self._converter = converter
        self._answers = answers
        self._writer_for: Callable[[type], Callable[[Any], Any]] = cache(self._choose_writer)
        # The first base class that fits counts.
        self._table: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (Enum, lambda member: self.free(member.value)),
            ((bool, type(None)), lambda value: value),
            (str, str.__str__),
            (int, int.__int__),
            (float, self.number),
            (Model, converter.unstructure),
            (Mapping, self.mapping),
            ((list, tuple, range), self.list),
            (datetime, format_moment),
            ((date, time), lambda moment: moment.isoformat()),
            ((bytes, bytearray), _text_of),
            (object, _refuse),
        )
        converter.register_unstructure_hook(float, self.number)
        converter.register_unstructure_hook(bytes, lambda octets: base64.b64encode(octets).decode("ascii"))
        converter.register_unstructure_hook(datetime, format_moment)
        converter.register_unstructure_hook_factory(_structured.is_model, self.model_of)
        converter.register_unstructure_hook_func(
            lambda kind: kind in (Any, object) or len(_structured.members_of(kind)) > 1, self.free
        )

    def free(self, value: Any) -> Any:
        """Return the JSON form of a value without a declared type. The class of the value determines it."""
        return self._writer_for(type(value))(value)

    def _choose_writer(self, kind: type) -> Callable[[Any], Any]:
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
        return {name: self.free(value) for name, value in _named(mapping).items()}

    def list(self, items: Any) -> Any:
        """Return a list or tuple itself if its items need no conversion, else a list of their JSON forms."""
        items = items if type(items) in (list, tuple) else [*items]
        kinds = set(map(type, items))
        # Long lists hold plain numbers or texts, so they are checked and not copied.
        if kinds <= _AS_THEY_ARE or (kinds <= _WITH_FLOATS and all(map(_is_finite, items))):
            return items
        return [self.free(item) for item in items]

    def model_of(self, cls: Any) -> Callable[[Any], dict[str, Any]]:
        """Return the function that converts a model to a dict, without declared fields that are None."""
        parts, write = _parts_of(cls), self.free
        if parts is Model._fields_out:
            tokens = override(unstruct_hook=self.free)
            overrides: dict[str, Any] = {"tokens": tokens} if cls.__name__ == "EncodedTextChunk" else {}
            parts = make_dict_unstructure_fn_from_attrs(
                [*_structured.fields_of(cls)], cls, self._converter, _cattrs_use_linecache=False, **overrides
            )
            write = _as_it_is

        def write_model(model: Any) -> dict[str, Any]:
            if type(model) is not cls:  # an instance of a subclass
                return cast("dict[str, Any]", self._converter.unstructure(model))
            return {name: write(value) for name, value in parts(model).items() if value is not None}

        return write_model


def _as_it_is(value: Any) -> Any:
    return value


def _is_finite(value: Any) -> bool:
    return type(value) is not float or math.isfinite(value)


def _datum_out(datum: types.Datum) -> dict[str, Any]:
    if datum.model_input_spans is not None or datum.loss_fn_input_spans is not None:
        raise Unfit("has provenance spans, which only protobuf bodies carry")
    return {"model_input": datum.model_input, "loss_fn_inputs": datum.loss_fn_inputs}


_PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "TensorData": tensor_out,
    "SampledSequence": sampled_sequence_out,
    "SampleResponse": sample_response_out,
    "Datum": _datum_out,
}
"""The functions that return the fields of models with arrays, under their JSON names."""


def _parts_of(cls: Any) -> Callable[[Any], dict[str, Any]]:
    named = (base.__name__ for base in cls.__mro__)
    return next((_PARTS[name] for name in named if name in _PARTS), cls._fields_out)


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
