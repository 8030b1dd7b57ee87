"""The exact values that each annotation accepts, and the place that a refusal names."""

from __future__ import annotations

import enum
import math
import os
import subprocess
import sys
from collections import OrderedDict
from datetime import date, datetime, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Union

import numpy as np
import pytest
from cattrs.errors import IterableValidationError
from support.values import for_each

import tinker_sync
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import _convert
from tinker_sync.types._convert import converter_for
from tinker_sync.types._structured import Unfit, short_repr

UTC = timezone.utc


class Word(str, enum.Enum):
    ONE = "1"
    A = "a"


class Place(enum.Enum):
    HERE = "here"


class Number(enum.Enum):
    ONE = 1


def convert(annotation: Any, value: Any) -> Any:
    return converter_for(annotation, "X.f")(value)


def refusal(annotation: Any, value: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        convert(annotation, value)
    return str(caught.value)


@for_each(
    ("annotation", "value", "expected"),
    [
        (str, "a", "a"),
        (str, Word.A, "a"),
        (str, np.str_("a"), "a"),
        (str, Place.HERE, "here"),
        (str, "☃".encode(), "☃"),
        (str, bytearray(b"a"), "a"),
        (int, 1, 1),
        (int, True, 1),
        (int, "1", 1),
        (int, " +1_000 ", 1000),
        (int, "1.0", 1),
        (int, b"-2", -2),
        (int, 3.0, 3),
        (int, 1e30, int(1e30)),
        (int, Decimal(10**20 + 1), 10**20 + 1),
        (int, Fraction(6, 2), 3),
        (int, np.int64(3), 3),
        (int, np.uint64(2**64 - 1), 2**64 - 1),
        (int, np.float32(3), 3),
        (int, np.bool_(True), 1),
        (int, np.array(3), 3),
        (int, np.array(3.0), 3),
        (int, Number.ONE, 1),
        (int, 2**70, 2**70),
        (float, 1.5, 1.5),
        (float, 1, 1.0),
        (float, True, 1.0),
        (float, " 1_0.5 ", 10.5),
        (float, b"1e5", 1e5),
        (float, "inf", math.inf),
        (float, Decimal("0.1"), 0.1),
        (float, Fraction(1, 4), 0.25),
        (float, np.float32(0.5), 0.5),
        (float, np.int8(-3), -3.0),
        (float, np.array(1.5), 1.5),
        (bool, True, True),
        (bool, 0, False),
        (bool, 1.0, True),
        (bool, "Yes", True),
        (bool, "t", True),
        (bool, "OFF", False),
        (bool, b"true", True),
        (bool, np.bool_(False), False),
        (bool, Decimal(1), True),
        (bytes, b"a", b"a"),
        (bytes, bytearray(b"a"), b"a"),
        (bytes, memoryview(b"a"), b"a"),
        (bytes, "aGk=", b"hi"),
        (datetime, datetime(2026, 1, 31, tzinfo=UTC), datetime(2026, 1, 31, tzinfo=UTC)),
        (datetime, "2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        (datetime, b"2026-01-31T12:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        (datetime, date(2026, 1, 31), datetime(2026, 1, 31)),  # noqa: DTZ001
        (datetime, 1_700_000_000, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (datetime, 1_700_000_000_000, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (datetime, -1, datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (datetime, "1700000000.5", datetime(2023, 11, 14, 22, 13, 20, 500_000, tzinfo=UTC)),
        (datetime, np.float64(0), datetime(1970, 1, 1, tzinfo=UTC)),
        (Literal["png", "a"], np.str_("png"), "png"),
        (Literal["png", "a"], Word.A, "a"),
        (Literal[0, 1, 2], True, 1),
        (Literal[0, 1, 2], 2.0, 2),
        (Literal[0, 1, 2], np.int64(0), 0),
        (Word, "a", Word.A),
        (Word, Word.A, Word.A),
        (list[str], ("a", "b"), ["a", "b"]),
        (list[str], {"a": 1}.keys(), ["a"]),
        (list[int], range(3), [0, 1, 2]),
        (list[int], (n for n in "12"), [1, 2]),
        (list[str], np.array(["a"]), ["a"]),
        (list[Any], (None, 1), [None, 1]),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (dict[str, str], MappingProxyType({"a": "b"}), {"a": "b"}),
        (dict[str, str], OrderedDict({b"a": "b"}), {"a": "b"}),
        (dict[str, Any], {"a": None}, {"a": None}),
        (int | None, None, None),
        (int | None, "1", 1),
        (Union[float, None], 1, 1.0),  # noqa: UP007  # another class at run time than `float | None`
        (Any | None, None, None),
    ],
)
def test_equivalents_are_exact_and_of_the_annotated_type(annotation: Any, value: Any, expected: Any) -> None:
    converted = convert(annotation, value)
    assert converted == expected
    assert type(converted) is type(expected)


@for_each(
    ("annotation", "value"),
    [
        *[(str, value) for value in (1, None, Number.ONE, b"\xff", ["a"], 1.5)],
        *[(int, value) for value in (1.5, "1.5", "1e3", "", ".0", "1.", "x", None, [1], math.nan, math.inf)],
        *[(int, value) for value in (Decimal("2.5"), Decimal("nan"), Fraction(3, 2), np.float32(3.5))],
        *[(int, value) for value in (np.array([3]), np.array([[3]]), 1j, np.complex64(1), b"\xff", Word.A)],
        *[(float, value) for value in ("", "x", None, [1.0], 10**400, np.array([1.5]), 1j, np.complex64(1))],
        *[(bool, value) for value in (2, "2", 0.5, None, "", " true ", "maybe", math.nan, [True])],
        *[(bytes, value) for value in ("no base64!", 5, None, [1])],
        *[(datetime, value) for value in (True, None, "", "soon", "2026-02-30", math.nan, math.inf, 1e300)],
        *[(datetime, value) for value in ("9" * 400, b"\xff", [2026], "2026-01-31T12:00:00+25:00")],
        *[(Literal["png"], value) for value in ("PNG", b"png", None, ["png"])],
        *[(Literal[0, 1], value) for value in ("1", 2, None, np.array([1]))],
        *[(Word, value) for value in ("b", None, 1)],
        *[(list[str], value) for value in ("ab", b"ab", {"a": 1}, 5, None, np.array("a"), ["a", 1])],
        *[(dict[str, str], value) for value in ([("a", "b")], None, "a", {1: "b"}, {"a": 1})],
        (int | None, "x"),
    ],
)
def test_what_has_no_equivalent_is_refused(annotation: Any, value: Any) -> None:
    assert refusal(annotation, value).startswith("X.f")


def test_an_error_of_the_users_own_iterable_is_the_users() -> None:
    def broken() -> Any:
        yield 1
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        convert(list[int], broken())


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (list[int], [1, 2**70]),
        (list[Word], [Word.A]),
        (list[int | None], [1, None]),
        (dict[str, float], {"a": 0.5}),
        (dict[str, Any], {"a": [1]}),
        (list[str] | None, ["a"]),
        (Literal["a"] | None, "a"),
        (Word | None, Word.A),
    ],
)
def test_exact_values_need_no_converter(annotation: Any, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convert, "_converter", None)
    assert convert(annotation, value) == value


def test_a_program_that_gives_exact_values_does_not_import_cattrs() -> None:
    code = (
        "from tinker_sync.types import Datum, ModelInput, SamplingParams; import sys; "
        "SamplingParams(max_tokens=1, temperature=1, stop=['a']); "
        "Datum(ModelInput.from_ints([1]), {'target_tokens': [2]}); print('cattrs' in sys.modules)"
    )
    root = str(Path(tinker_sync.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"False"]


@pytest.mark.parametrize("annotation", [list[int], dict[str, int]])
def test_a_million_wrong_items_cost_no_more_than_twenty(annotation: Any) -> None:
    looked_at = []

    def refuse(value: Any, _: Any) -> Any:
        looked_at.append(value)
        raise Unfit("expected nothing")

    converter = _convert.make_converter(
        lambda value, _: value, lambda value, _: value, lambda kind: refuse, lambda kind: refuse
    )
    converter.register_structure_hook(int, refuse)
    items: Any = range(1000) if annotation == list[int] else dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 1)
    with pytest.raises(IterableValidationError) as caught:
        converter.structure(items, annotation)
    assert len(looked_at) == len(caught.value.exceptions) == 20


def test_anything_goes_where_anything_is_declared() -> None:
    for annotation in (Any, object):
        assert convert(annotation, value := object()) is value


# ------------------------------------------------------------------------------------------- short_repr
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1, 2], "[1, 2]"),
        ((1,), "(1)"),
        (range(9), "[0, 1, 2, … 9 items]"),
        (list(range(8)), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        ({"a": [b"xyz"]}, "{'a': [<3 bytes>]}"),
        (dict.fromkeys(range(9)), "{" + ", ".join(f"{n}: None" for n in range(8)) + ", … 9 items}"),
        (np.zeros((2, 3), np.float32), "array([2, 3], float32)"),
        (np.float32(0.5), repr(np.float32(0.5))),
        (b"abc", "<3 bytes>"),
        (memoryview(b"abc"), "<3 bytes>"),
        (None, "None"),
    ],
)
def test_reprs_are_short(value: object, shown: str) -> None:
    assert short_repr(value) == shown
