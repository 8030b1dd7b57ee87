"""`AsDataclass`: classes that the functions of the standard module `dataclasses` take for dataclasses.

Scripts use `dataclasses.replace`, `fields`, `asdict` and `is_dataclass` on these classes, because they are
dataclasses in the reference client. They stay attrs classes. A program that does not use `dataclasses` does
not load it, because the dataclass that describes a class is made when its fields are first asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import attrs

if TYPE_CHECKING:
    import dataclasses

    from typing_extensions import Self


class _OfDataclass:
    """A descriptor that returns an attribute of the dataclass with the fields of its owner."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, _: object, owner: type[AsDataclass]) -> Any:
        try:
            return getattr(_dataclass_like(cast("Any", owner)), self._name)
        except attrs.exceptions.NotAnAttrsClassError:  # a base class that has no fields
            raise AttributeError(f"{owner.__name__} has no fields", name=self._name) from None


class AsDataclass:
    """The base class of the classes that `dataclasses` takes for dataclasses.

    The fields are the parameters of the constructor, so `dataclasses.replace` converts and checks new values
    as the constructor does.

    >>> import dataclasses
    >>> from tinker_sync.types import SampledProvenanceSpan
    >>> span = SampledProvenanceSpan(sequence_id="seq-1", length=5)
    >>> dataclasses.asdict(dataclasses.replace(span, offset=2))
    {'sequence_id': 'seq-1', 'offset': 2, 'length': 5}
    """

    __slots__ = ()

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    else:
        __dataclass_fields__ = _OfDataclass()
        __dataclass_params__ = _OfDataclass()

    def __replace__(self, /, **changes: Any) -> Self:  # for `copy.replace`, which is new in Python 3.13
        from dataclasses import replace

        return replace(self, **changes)

    @classmethod
    def _dataclass_fields(cls) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield the name and the type of each field, and its arguments for `dataclasses.field`."""
        for field in attrs.fields(cast("Any", cls)):
            if field.init:
                default: Any = field.default
                given = {"repr": bool(field.repr), "compare": bool(field.eq), "kw_only": bool(field.kw_only)}
                if hasattr(default, "factory"):
                    given["default_factory"] = default.factory
                elif default is not attrs.NOTHING:
                    given["default"] = default
                yield field.alias, field.type, given


@cache
def _dataclass_like(cls: type[AsDataclass]) -> type:
    """Return a dataclass with the fields of a class. It is never instantiated."""
    from dataclasses import field, make_dataclass

    fields = [(name, kind, field(**given)) for name, kind, given in cls._dataclass_fields()]
    return make_dataclass(cls.__name__, fields, frozen=True, init=False, repr=False, eq=False)
