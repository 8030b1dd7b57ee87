"""Trees to values: what of an answer arrives, and what is said of the rest.

Chosen by the class that is wanted. Readers take what the reference client takes (digits for a number, a whole
float for an int) and nothing that would change on the way. They raise `Unfit` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import attrs
from cattrs import Converter

from tinker_sync._secret import mask_text
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    Datum,
    EncodedTextChunk,
    OptimStepRequest,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinker_sync.types._convert import converter_for, field_names, union_from, union_table
from tinker_sync.wire.json._arrays import float32_in, numbers_in, tokens_in, topk_in
from tinker_sync.wire.json._kinds import is_list, is_literal, is_mapping, is_model, is_union
from tinker_sync.wire.json._unfit import Problem, Unfit, at, each, formatted, refused_by, unfit

Reader = Callable[[Any], Any]
Hook = Callable[[Any, Any], Any]
"""A reader as cattrs wants it: it is also told the class."""

_EXPECTED: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    bytes: "base64 text",
    datetime: "a moment such as 2026-01-31T12:00:00Z",
}
# What models raise when their fields do not go together.
_OBJECTIONS = (TypeError, ValueError, ArithmeticError, AssertionError)
_ABSENT = object()

_MOST_NOTED = 100
"""A body of nothing but unknown fields costs no more memory than this many names."""
_ignored: ContextVar[set[str]] = ContextVar("_ignored")


@contextmanager
def noting() -> Iterator[set[str]]:
    """Collect the fields that lenient readers ignore in this block, as names such as `Datum.colour`."""
    names: set[str] = set()
    token = _ignored.set(names)
    try:
        yield names
    finally:
        _ignored.reset(token)


def note(names: Iterable[str], owner: str) -> None:
    """Add unknown fields of an object to what `noting` collects."""
    noted = _ignored.get()
    for name in names:
        if len(noted) >= _MOST_NOTED:
            return
        noted.add(mask_text(owner + formatted(name)))


class Readers:
    """Makes the readers of one converter, each once. Made when the converter is, and kept by its hooks.

    Args:
        converter: the one to teach.
        answers: ignore unknown fields, and read null among numbers as NaN. In a request unknown fields are
            refused.
        lenient: ignore unknown fields of requests too, and report them to `noting`.
    """

    def __init__(self, converter: Converter, *, answers: bool, lenient: bool = False) -> None:
        self._converter = converter
        self._answers = answers
        self._lenient = lenient

    def register(self) -> None:
        """Teach the converter."""
        converter = self._converter
        for kind in (*_EXPECTED, Enum):
            converter.register_structure_hook(kind, _read_scalar)
        converter.register_structure_hook_func(is_literal, _read_scalar)
        converter.register_structure_hook_func(lambda kind: kind in (Any, object), lambda tree, _: tree)
        converter.register_structure_hook_factory(is_list, self.list_of)
        converter.register_structure_hook_factory(is_mapping, self.mapping_of)
        converter.register_structure_hook_factory(is_union, self.union_of)
        converter.register_structure_hook_factory(is_model, self.model_of)
        converter.register_structure_hook(TensorData, self.read_tensor)

    def reader_of(self, kind: Any) -> Reader:
        """What reads a value of a kind."""
        hook = self._converter.get_structure_hook(kind)
        return lambda tree: hook(tree, kind)

    def _item_reader_of(self, kind: Any) -> Reader:
        read = self.reader_of(kind)
        if kind is float and self._answers:
            return lambda tree: math.nan if tree is None else read(tree)
        return read

    def list_of(self, kind: Any) -> Hook:
        """What reads a list."""
        read = self._item_reader_of(get_args(kind)[0])

        def read_list(tree: Any, _: Any) -> list[Any]:
            if not isinstance(tree, list):
                raise unfit("expected a list", tree)
            return [item for _, item in each(enumerate(tree), read)]

        return read_list

    def mapping_of(self, kind: Any) -> Hook:
        """What reads an object of any names."""
        read = self._item_reader_of(get_args(kind)[1])
        return lambda tree, _: dict(each(_fields_of(tree).items(), read))

    def union_of(self, kind: Any) -> Hook:
        """What reads one of several kinds, or null."""
        members = tuple(member for member in get_args(kind) if member is not type(None))
        if len(members) == 1:
            read = self.reader_of(members[0])
        elif all(is_model(member) for member in members):
            read = self._tagged(members)
        else:
            read = self._plain_union(members)
        if len(members) == len(get_args(kind)):
            return lambda tree, _: read(tree)
        return lambda tree, _: None if tree is None else read(tree)

    def _tagged(self, members: tuple[Any, ...]) -> Reader:
        tag_name, by_tag, open_member = union_table(members)
        readers = {tag: self.reader_of(member) for tag, member in by_tag.items()}
        if open_member is not None or len(by_tag) < len(members):
            return self._open_union(members, tag_name, readers)
        expected = f"expected one of {', '.join(map(repr, by_tag))}"

        def read_tagged(tree: Any) -> Any:
            tag = _fields_of(tree).get(tag_name, _ABSENT)
            read = readers.get(tag) if isinstance(tag, str) else None
            if read is not None:
                return read(tree)
            if tag is _ABSENT:
                raise Unfit(Problem(f"is missing; {expected}", steps=[tag_name]))
            raise Unfit(Problem(expected, tag, steps=[tag_name]))

        return read_tagged

    def _open_union(self, members: tuple[Any, ...], tag_name: str, readers: dict[str, Reader]) -> Reader:
        """What reads a union that has a member for unknown tags, or members without a tag."""

        def read_strictly(tree: Any) -> Any:
            return _made(lambda **fields: union_from(members, fields, ""), "", _fields_of(tree))

        def read_leniently(tree: Any) -> Any:
            fields = _fields_of(tree)
            if tag_name not in fields:
                best = max(members, key=lambda member: len(fields.keys() & set(field_names(member))))
                return self.reader_of(best)(tree)
            tag = fields[tag_name]
            return readers.get(tag if isinstance(tag, str) else "", read_strictly)(tree)

        return read_leniently if self._lenient else read_strictly

    def _unknown(self, names: set[str], cls: type) -> list[Problem]:
        """What is wrong with unknown fields of a request: nothing where they are noted and ignored."""
        if not self._lenient:
            return [Problem(f"{cls.__name__} has no such field", steps=[name]) for name in sorted(names)]
        note(names, cls.__name__)
        return []

    def _plain_union(self, members: tuple[Any, ...]) -> Reader:
        """Text stays text, and so on; what is none of the members becomes the first that takes it."""
        readers = [(member, self.reader_of(member)) for member in members]
        expected = " or ".join(_EXPECTED.get(member, str(member)) for member in members)

        def read_plain(tree: Any) -> Any:
            fitting = [read for member, read in readers if type(tree) is member]
            for read in fitting or [read for _, read in readers]:
                with suppress(Unfit):
                    return read(tree)
            raise unfit(f"expected {expected}", tree)

        return read_plain

    def model_of(self, cls: Any) -> Hook:
        """What reads an object of a model's fields."""
        if cls.__open__:
            return lambda tree, _: _made(cls, cls.__name__, _fields_of(tree))
        rows = tuple(_rows(cls, self.reader_of))
        known = frozenset(row.name for row in rows)
        ignoring = self._answers or (cls.__response__ and not self._lenient)

        def read_model(tree: Any, _: Any) -> Any:
            fields = _fields_of(tree)
            problems: list[Problem] = [] if ignoring else self._unknown(fields.keys() - known, cls)
            arguments: dict[str, Any] = {}
            for row in rows:
                try:
                    given = row.given(fields)
                    if given is not _ABSENT:
                        arguments[row.argument] = row.read(given)
                except Unfit as one:
                    problems.extend(one.under(row.name))
            if problems:
                raise Unfit(*problems)
            return _made(cls, cls.__name__, arguments)

        return read_model

    def read_tensor(self, tree: Any, _: Any) -> Any:
        """What reads a tensor."""
        fields = _fields_of(tree)
        dtype = at("dtype", self.reader_of(Literal["int64", "float32"]), fields.get("dtype"))
        arguments = {"dtype": dtype}
        arguments["data"] = at("data", lambda data: numbers_in(data, dtype), fields.get("data"))
        for name in ("shape", "sparse_crow_indices", "sparse_col_indices"):
            arguments[name] = at(name, self.reader_of(list[int] | None), fields.get(name))
        if not self._answers and (problems := self._unknown(fields.keys() - arguments.keys(), TensorData)):
            raise Unfit(*problems)
        return _made(TensorData, "TensorData", arguments)


# --------------------------------------------------------------------------------------------- scalars


def _read_scalar(tree: Any, kind: Any) -> Any:
    convert, expected = _scalar(kind)
    # A float this large is what is left of a whole number of more than 64 bits; its last digits are gone.
    if not (kind is int and isinstance(tree, float) and abs(tree) >= 2**63):
        with suppress(InvalidInputError):
            return convert(tree)
    raise unfit(expected, tree)


@cache
def _scalar(kind: Any) -> tuple[Callable[[Any], Any], str]:
    convert = converter_for(kind, "") or (lambda value: value)
    if kind in _EXPECTED:
        return convert, f"expected {_EXPECTED[kind]}"
    choices = get_args(kind) or [member.value for member in kind]
    return convert, f"expected one of {', '.join(map(repr, choices))}"


# ---------------------------------------------------------------------------------------------- models


class _Row(NamedTuple):
    """One field of a model."""

    name: str
    """What it is called on the wire."""
    argument: str
    read: Reader
    required: bool = False
    null_is_default: bool = False
    if_absent: Any = _ABSENT

    def given(self, fields: dict[str, Any]) -> Any:
        """What an object has for it."""
        given = fields.get(self.name, self.if_absent)
        if given is _ABSENT and self.required:
            raise unfit("is missing")
        return _ABSENT if given is None and self.null_is_default else given


def _list_as_given(tree: Any) -> Any:
    """For a field whose model looks at each item itself."""
    if not isinstance(tree, list):
        raise unfit("expected a list", tree)
    return tree


_SPECIAL: dict[type, dict[str, tuple[str, Reader]]] = {
    EncodedTextChunk: {"tokens": ("tokens", _list_as_given)},
    SamplingParams: {"stop": ("stop", lambda tree: tree)},
    SampledSequence: {
        "tokens_np": ("tokens", tokens_in),
        "logprobs_np": ("logprobs", float32_in),
        "topk_logprobs_np": ("topk_logprobs", topk_in),
    },
    SampleResponse: {
        "prompt_logprobs_np": ("prompt_logprobs", float32_in),
        "topk_prompt_logprobs_np": ("topk_prompt_logprobs", topk_in),
    },
}
"""Fields that have another name on the wire, or more in them than their annotation says."""

_UNSPOKEN: dict[type, tuple[str, ...]] = {Datum: ("model_input_spans", "loss_fn_input_spans")}
"""Fields that only protobuf bodies carry."""

_ALIASES: dict[type, dict[str, tuple[str, ...]]] = {
    OptimStepRequest: {"optim_params": ("adam_params", "optimizer_params")}
}
"""Other names under which a field may come; the model's constructor knows them."""


def _rows(cls: Any, reader_of: Callable[[Any], Reader]) -> Iterator[_Row]:
    special, aliases = _SPECIAL.get(cls, {}), _ALIASES.get(cls, {})
    for name in field_names(cls):
        field: attrs.Attribute[Any] = getattr(attrs.fields(cls), name)
        optional = field.default is not attrs.NOTHING
        if name in _UNSPOKEN.get(cls, ()):
            continue
        if name in special:
            wire_name, read = special[name]
            yield _Row(wire_name, name, read, not optional, null_is_default=True)
            continue
        nullable = field.type in (Any, object) or type(None) in get_args(field.type)
        read = reader_of(field.type)
        required = not (optional or name in aliases)
        # Where None must be said in Python, it still is what writers leave out.
        if_absent = None if required and nullable else _ABSENT
        yield _Row(name, name, read, required, optional and not nullable, if_absent)
        yield from (_Row(alias, alias, read) for alias in aliases.get(name, ()))


def _fields_of(tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return tree
    raise unfit("expected an object", tree)


def _made(make: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Any:
    """What a constructor makes of checked fields, if it has no objections of its own."""
    try:
        return make(**arguments)
    except _OBJECTIONS as error:
        refusal = refused_by(name, error)
    raise refusal
