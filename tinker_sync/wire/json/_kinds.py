"""What sort of annotation it is: the questions by which readers are chosen."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_origin

from tinker_sync.types._convert import Structured


def is_literal(kind: Any) -> bool:
    """One of several fixed values."""
    return get_origin(kind) is Literal


def is_union(kind: Any) -> bool:
    """One of several kinds, under either of the two spellings."""
    return get_origin(kind) in (Union, types.UnionType)


def is_list(kind: Any) -> bool:
    """A list of one kind."""
    return get_origin(kind) in (list, Sequence)


def is_mapping(kind: Any) -> bool:
    """A mapping of names to one kind."""
    return get_origin(kind) in (dict, Mapping)


def is_model(kind: Any) -> bool:
    """A model."""
    return isinstance(kind, type) and issubclass(kind, Structured)
