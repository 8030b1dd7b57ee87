"""The cattrs converters between trees and values: fields as they travel, and what JSON does oddly.

cattrs generates the functions for models. Hooks exist for arrays, for null and NaN, for unions, whose errors
name the known tags, and for free-form values, which are written by their own class and not by an annotation.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import PurePath
from typing import Any, Literal, get_args
from uuid import UUID

import attrs
import numpy as np
from cattrs import Converter, override
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    OptimStepRequest,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinker_sync.types import _convert as convert
from tinker_sync.types._model import Model
from tinker_sync.types._moment import format_moment
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
from tinker_sync.wire.json._unfit import MAX_PROBLEMS, Steps, Unfit, at

Unknown = Callable[[type, set[str]], object]
"""A function that is called with a class and the unknown fields of an object that is to become one."""


def make_converter(*, answers: bool, unknown: Unknown | None = None) -> Converter:
    """Return the converter for answers, or for requests.

    Args:
        answers: unknown fields are ignored; NaN and infinities are null, in both directions. In a request they
            are refused.
        unknown: is called with unknown fields, which are ignored then, in a request too.

    >>> from tinker_sync.types import LoraConfig
    >>> make_converter(answers=False).unstructure(LoraConfig(rank=8))["rank"]
    8
    """
    reading = _Reading(answers, unknown)
    reading.converter = converter = convert.make_converter(
        reading.list_in, reading.mapping_in, reading.model_of, reading.union_of
    )
    converter.register_structure_hook(int, _whole_number)
    converter.register_structure_hook(TensorData, reading.tensor)
    _Writing(converter, answers)
    return converter


# ------------------------------------------------------------------------------------------------- reading


def _whole_number(tree: Any, _: Any) -> Any:
    # A float this large is what is left of a whole number of more than 64 bits; its last digits are gone.
    if isinstance(tree, float) and abs(tree) >= 2**63:
        raise convert.Unsuitable("a whole number", tree)
    return convert.SCALARS[int](tree)


def _object(tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return tree
    raise Unfit("expected an object", tree)


def _list_as_given(tree: Any, _: Any) -> Any:
    """Accept a list whose items the model checks."""
    if not isinstance(tree, list):
        raise Unfit("expected a list", tree)
    return tree


def _as_given(tree: Any, _: Any) -> Any:
    return tree


_READ: dict[tuple[type, str], Callable[[Any, Any], Any]] = {
    (EncodedTextChunk, "tokens"): _list_as_given,
    (SamplingParams, "stop"): _as_given,
    (ForwardBackwardInput, "loss_fn_config"): _as_given,
    (SampledSequence, "tokens_np"): tokens_in,
    (SampledSequence, "logprobs_np"): float32_in,
    (SampledSequence, "topk_logprobs_np"): topk_in,
    (SampleResponse, "prompt_logprobs_np"): float32_in,
    (SampleResponse, "topk_prompt_logprobs_np"): topk_in,
}
"""Fields that have more in them than their annotation describes."""

_PROTOBUF_ONLY = ("model_input_spans", "loss_fn_input_spans")
_OPTIM_NAMES = ("optim_params", "adam_params", "optimizer_params")


class _Reading:
    """The hooks that structure trees."""

    converter: Converter

    def __init__(self, answers: bool, unknown: Unknown | None) -> None:
        self._answers = answers
        self._unknown = unknown

    def list_in(self, tree: Any, kind: Any) -> list[Any]:
        """Return the items of a list; null among the numbers of an answer is NaN."""
        if not isinstance(tree, list):
            raise Unfit("expected a list", tree)
        if self._answers and get_args(kind)[0] is float:
            return [math.nan if item is None else item for item in tree]
        return tree

    def mapping_in(self, tree: Any, kind: Any) -> dict[str, Any]:
        """Return the items of an object; null among the numbers of an answer is NaN."""
        items = _object(tree)
        if self._answers and get_args(kind)[1] is float:
            return {name: math.nan if item is None else item for name, item in items.items()}
        return items

    def model_of(self, cls: Any) -> convert.Hook:
        """Return the hook for objects of a model's fields."""
        if cls.__open__:
            return lambda tree, _: cls(**_object(tree))
        if cls is OptimStepRequest:
            return self._optim_step
        fields = [each for each in convert.fields_of(cls) if not each.name.startswith("_")]
        structure = make_dict_structure_fn(
            cls,
            self.converter,
            _cattrs_forbid_extra_keys=not self._ignores_unknown(cls),
            _cattrs_use_linecache=False,
            **{
                each.name: override(
                    omit=each.name.startswith("_") or (cls is Datum and each.name in _PROTOBUF_ONLY),
                    rename=each.name.removesuffix("_np"),
                    struct_hook=_READ.get((cls, each.name)),
                )
                for each in convert.fields_of(cls)
            },
        )
        known = {each.name.removesuffix("_np") for each in fields}
        nullable = {each.name for each in fields if _takes_none(each.type) and (cls, each.name) not in _READ}
        optional = {each.name for each in fields if each.default is not attrs.NOTHING}
        null_is_default = {name.removesuffix("_np") for name in optional - nullable}
        # Where None has no default in Python, writers still leave it out.
        if_absent = dict.fromkeys(nullable - optional)

        def read(tree: Any, _: Any) -> Any:
            given = {**if_absent, **_object(tree)}
            if self._unknown is not None and not known.issuperset(given):
                self._unknown(cls, given.keys() - known)
            for name in null_is_default:
                if name in given and given[name] is None:
                    del given[name]
            return structure(given, cls)

        return read

    def _ignores_unknown(self, cls: Any) -> bool:
        return self._answers or cls.__response__ or self._unknown is not None

    def _optim_step(self, tree: Any, _: Any) -> OptimStepRequest:
        """Read the settings of a step under any of their names; the constructor counts them."""
        fields = dict(_object(tree))
        kinds = {each.name: each.type for each in convert.fields_of(OptimStepRequest)}
        arguments = {}
        for name in (*_OPTIM_NAMES, "model_id", "seq_id", "type"):
            given = fields.pop(name, None)
            if given is not None or name == "model_id":
                kind = kinds.get(name, kinds["optim_params"])
                arguments[name] = at(name, lambda tree, kind=kind: self.converter.structure(tree, kind), given)
        if fields and not self._ignores_unknown(OptimStepRequest):
            raise Unfit("OptimStepRequest has no such field", steps=(min(fields),))
        return OptimStepRequest(**arguments)

    def union_of(self, kind: Any) -> convert.Hook:
        """Return the hook for one of several models, or null."""
        members = convert.members_of(kind)
        tag_name, by_tag, open_member = convert.union_table(members)
        if open_member is not None or len(by_tag) < len(members):
            return lambda tree, _: tree if tree is None and _takes_none(kind) else convert.union_from(kind, _object(tree))
        hooks = {tag: self.converter.get_structure_hook(member) for tag, member in by_tag.items()}
        expected = f"expected one of {', '.join(map(repr, by_tag))}"

        def read(tree: Any, _: Any) -> Any:
            if tree is None and _takes_none(kind):
                return None
            fields = _object(tree)
            if tag_name not in fields:
                raise Unfit(f"is missing; {expected}", steps=(tag_name,))
            tag = fields[tag_name]
            if not isinstance(tag, str) or tag not in hooks:
                raise Unfit(expected, tag, steps=(tag_name,))
            return hooks[tag](tree, by_tag[tag])

        return read

    def tensor(self, tree: Any, _: Any) -> TensorData:
        """Read a tensor: its numbers in one step."""
        fields = _object(tree)
        structure = self.converter.structure
        dtype = at("dtype", lambda given: structure(given, Literal["int64", "float32"]), fields.get("dtype"))
        arguments = {"dtype": dtype, "data": at("data", lambda data: numbers_in(data, dtype), fields.get("data"))}
        for name in ("shape", "sparse_crow_indices", "sparse_col_indices"):
            arguments[name] = at(name, lambda given: structure(given, list[int] | None), fields.get(name))
        if added := fields.keys() - arguments.keys():
            if self._unknown is not None:
                self._unknown(TensorData, added)
            elif not self._answers:
                raise Unfit("TensorData has no such field", steps=(min(added),))
        return TensorData(**arguments)


def _takes_none(kind: Any) -> bool:
    return kind in (Any, object) or type(None) in get_args(kind)


# ------------------------------------------------------------------------------------------------- writing

_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
_WITH_FLOATS = _AS_THEY_ARE | {float}


class _Writing:
    """The hooks that unstructure values: of models by their annotations, of free-form values by their class."""

    def __init__(self, converter: Converter, answers: bool) -> None:
        self._converter = converter
        self._answers = answers
        self._writer_for = cache(self._choose_writer)
        # The first that fits is taken.
        self._table: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (Enum, lambda member: self.free(member.value)),
            ((bool, type(None)), lambda value: value),
            (str, str.__str__),
            (int, int.__int__),
            (float, self.number),
            (Model, converter.unstructure),
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
        converter.register_unstructure_hook(float, self.number)
        converter.register_unstructure_hook(bytes, lambda octets: base64.b64encode(octets).decode("ascii"))
        converter.register_unstructure_hook(datetime, format_moment)
        converter.register_unstructure_hook_factory(convert.is_model, self.model_of)
        converter.register_unstructure_hook_func(
            lambda kind: kind in (Any, object) or len(convert.members_of(kind)) > 1, self.free
        )

    def free(self, value: Any) -> Any:
        """Return what of a free-form value leaves."""
        return self._writer_for(type(value))(value)

    def _choose_writer(self, kind: type) -> Callable[[Any], Any]:
        return next(writer for base, writer in self._table if issubclass(kind, base))

    def number(self, number: float) -> float | None:
        """Return a float, if JSON has it."""
        if math.isfinite(number):
            return float.__float__(number)
        if self._answers:
            return None
        raise Unfit("expected a number that JSON has", float.__float__(number))

    def mapping(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        """Return a mapping under the names JSON has for its keys."""
        return {name: self.free(value) for name, value in _named(mapping).items()}

    def list(self, items: Any) -> Any:
        """Return a list or tuple itself if it may leave as it is, else a list."""
        kinds = set(map(type, items))
        # Long lists hold plain numbers or texts. They are looked at, not copied.
        if type(items) in (list, tuple) and kinds <= _WITH_FLOATS:
            if float not in kinds or all(map(math.isfinite, (item for item in items if type(item) is float))):
                return items
        return [self.free(item) for item in items]

    def model_of(self, cls: Any) -> Callable[[Any], dict[str, Any]]:
        """Return the writer of a model. None stands for absent in a declared field, and only there."""
        parts = _PARTS.get(cls)
        if issubclass(cls, TensorData):
            parts = tensor_out
        if parts is None and cls._fields_out is not Model._fields_out:
            parts = cls._fields_out
        if parts is not None:
            return lambda model: {n: self.free(v) for n, v in parts(model).items() if v is not None}
        overrides = {"tokens": override(unstruct_hook=self.free)} if cls is EncodedTextChunk else {}
        unstructure = make_dict_unstructure_fn(cls, self._converter, _cattrs_use_linecache=False, **overrides)
        return lambda model: {n: v for n, v in unstructure(model).items() if v is not None}


def _datum_out(datum: Datum) -> dict[str, Any]:
    if datum.model_input_spans is not None or datum.loss_fn_input_spans is not None:
        raise Unfit("has provenance spans, which only protobuf bodies carry")
    return {"model_input": datum.model_input, "loss_fn_inputs": datum.loss_fn_inputs}


_PARTS: dict[type, Callable[[Any], dict[str, Any]]] = {
    TensorData: tensor_out,
    SampledSequence: sampled_sequence_out,
    SampleResponse: sample_response_out,
    Datum: _datum_out,
}
"""The fields, as they travel, of models that hold arrays."""


def problems_of(value: Any, write: Callable[[Any], Any], steps: Steps = ()) -> list[tuple[Steps, Exception]]:
    """Return the first values within a value that cannot be written, after the steps that lead to them."""
    return list(islice(_problems(value, write, steps), MAX_PROBLEMS))


def _problems(value: Any, write: Callable[[Any], Any], steps: Steps) -> Iterator[tuple[Steps, Exception]]:
    try:
        items = _items(value)
        if items is None:
            write(value)
    except (Unfit, InvalidInputError) as error:
        yield steps, error
        return
    for step, item in items or ():
        yield from _problems(item, write, (*steps, step))


def _items(value: Any) -> Any:
    """Return the parts of a container with their steps; None for any other value."""
    if isinstance(value, Model):
        kind = TensorData if isinstance(value, TensorData) else type(value)
        fields = _PARTS.get(kind, Model._fields_out if False else type(value)._fields_out)(value)
        # Declared bytes travel as base64, whatever they are.
        return [(name, part) for name, part in fields.items() if not isinstance(part, bytes)]
    if isinstance(value, Mapping):
        return _named(value).items()
    return enumerate(value) if isinstance(value, (list, tuple, range)) else None


def _refuse(value: Any) -> Any:
    raise Unfit("expected something JSON has: text, numbers, true, false, null, lists, mappings", value)


def _text_of(octets: bytes | bytearray) -> str:
    """Return bytes amid free-form values as text, the only form that all readers understand."""
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
    """Return a key as the standard library writes it."""
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
    raise Unfit("expected keys that are text or numbers", key)
