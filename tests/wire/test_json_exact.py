"""Values that need no conversion skip the converters of cattrs, with the same results."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.json_cases import answer_kinds, random_answer, spoiled

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.json._exact import NotExact, model_of
from tinker_sync.wire.json._reader import make_converter

ROUNDS = 20


def outcome(convert: Any, *arguments: Any) -> Any:
    """Return the result of a conversion, or the class of its error."""
    try:
        return convert(*arguments)
    except NotExact:
        raise
    except Exception as error:  # noqa: BLE001  # compared below
        return type(error)


def test_answers_are_read_as_the_converters_read_them() -> None:
    rng, exact = random.Random(2), 0
    read = make_converter(answers=True).structure
    for cls in answer_kinds().values():
        for _ in range(ROUNDS):
            tree = random_answer(rng, cls)
            for each in (tree, {**tree, "new": 1}, spoiled(rng, tree)):
                try:
                    short = model_of(each, cls)
                except NotExact:
                    continue
                exact += 1
                assert short == outcome(read, each, cls), (cls, each)
    assert exact > 500


def test_none_stands_for_absent_in_declared_fields_alone() -> None:
    request = types.CreateSessionRequest(tags=[], user_metadata={"a": None}, sdk_version="1")
    assert wire_json.to_plain(request)["user_metadata"] == {"a": None}
    assert "project_id" not in wire_json.to_plain(request)
    assert wire_json.to_plain({"a": None}) == {"a": None}


def test_a_list_within_itself_is_refused_as_too_deep() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidInputError, match="more than 100 deep"):
        wire_json.to_plain(endless)
