"""The cattrs converters from parsed JSON to the types of this package.

cattrs generates the functions for models. Hooks, which are functions that cattrs calls, handle arrays, which
lists of numbers become in one step, null and NaN, and unions, whose errors list the known tags.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs
from cattrs import Converter, ForbiddenExtraKeysError, override
from cattrs.gen import make_dict_structure_fn_from_attrs

from tinker_sync import types
from tinker_sync._base.numpy import AnyArray, Int32Array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import _convert, _structured
from tinker_sync.types._arrays import to_float32, to_int32, tokens_as_int32, wire_array
from tinker_sync.types._structured import ABSENT, Unfit
from tinker_sync.types.scalars import TensorDtype
from tinker_sync.wire.json._unfit import at

if TYPE_CHECKING:
    from tinker_sync.types import TopkLogprobs

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
    >>> make_converter(answers=False).structure({"rank": "8"}, LoraConfig).rank
    8
    """
    reading = _Reading(answers, unknown)
    reading.converter = converter = _convert.make_converter(
        reading.list_in, reading.mapping_in, reading.model_of, reading.union_of
    )
    converter.register_structure_hook(int, _whole_number)
    converter.register_structure_hook_func(_is_tensor, reading.tensor)
    return converter


# ------------------------------------------------------------------------------------------------- arrays


def numbers_in(given: Any, dtype: Literal["int64", "float32"]) -> AnyArray:
    """Return a flat list of numbers as an array. For float32, a null in the list becomes NaN."""
    if not isinstance(given, list):
        raise Unfit("expected a list of numbers", given)
    floats = _floats(given) if dtype == "float32" else None
    array = wire_array(given if floats is None else floats, "", dtype)
    if array.ndim != 1:
        raise Unfit("expected a flat list of numbers, got lists in it")
    return array


def _floats(given: list[Any]) -> AnyArray | None:
    """Return the numbers as a float64 array, with NaN for a None; None if an item cannot be a float."""
    try:
        return np.array(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None


def float32_in(given: Any) -> AnyArray:
    """Return a flat list of numbers and nulls as a float32 array; a null becomes NaN."""
    return numbers_in(given, "float32")


def tokens_in(given: Any) -> Int32Array:
    if not isinstance(given, list):
        raise Unfit("expected a list of token ids", given)
    return tokens_as_int32(given, "")


def topk_in(given: Any) -> TopkLogprobs:
    """Return the likeliest tokens of each position as two padded matrices: token ids and log-probabilities.

    `given` has, for each position, a list of [token id, log-probability] pairs, or null.
    """
    if not isinstance(given, list):
        raise Unfit("expected a list of positions", given)
    from tinker_sync.types.sampling import NO_LOGPROB, TopkLogprobs

    rows = [at(index, _row, row) for index, row in enumerate(given)]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    # Positions without pairs keep their rows, so there is at least one column.
    width = max(1, int(lengths.max())) if rows else 0
    token_ids = np.zeros((len(rows), width), dtype=np.int32)
    logprobs = np.full((len(rows), width), NO_LOGPROB, dtype=np.float32)
    filled = np.arange(width) < lengths[:, np.newaxis]
    if filled.any():
        token_ids[filled], logprobs[filled] = _columns(rows)
    return TopkLogprobs(token_ids, logprobs)


def _row(row: Any) -> list[Any]:
    if row is not None and not isinstance(row, list):
        raise Unfit("expected a list of [token id, log-probability] pairs, or null", row)
    return row or []


def _columns(rows: list[list[Any]]) -> tuple[AnyArray, AnyArray]:
    """Return the token ids and the log-probabilities of all pairs as two arrays."""
    pairs = _floats(list(chain.from_iterable(rows)))
    if pairs is not None and pairs.ndim == 2 and pairs.shape[1] == 2:
        with suppress(InvalidInputError):
            return to_int32(pairs[:, 0], ""), to_float32(pairs[:, 1], "")
    # Check the pairs one by one, to find the place of the error. A pair that is valid alone cannot have
    # failed above.
    for index, row in enumerate(rows):
        for position, pair in enumerate(row):
            at(index, partial(at, position, _pair), pair)
    raise Unfit("expected pairs of a token id and a log-probability")


def _pair(pair: Any) -> None:
    if not isinstance(pair, list) or len(pair) != 2:
        raise Unfit("expected a pair of a token id and a log-probability", pair)
    tokens_in(pair[:1])
    float32_in([0.0, pair[1]])  # at index 1, which the error names


# ------------------------------------------------------------------------------------------------- models


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
