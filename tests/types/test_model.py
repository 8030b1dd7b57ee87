"""The base of all models: construction, refusals, dumping, copying, reprs, unions of models."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timezone
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
import pytest

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData
from tinker_sync.types._model import Model, model
from tinker_sync.types._structured import model_from

SECRET = "marked-secret-77"


class Colour(str, enum.Enum):
    RED = "red"


@model
class Leaf(Model):
    size: int
    name: str = "leaf"


@model
class Twig(Leaf):
    name: str = "twig"
    green: bool = True


class Sprout(Leaf):
    """A subclass of a model like those in scripts: without the decorator, and with its own constructor."""

    def __init__(self, size: int, **fields: Any) -> None:
        super().__init__(size=size, **{"name": "sprout", **fields})


@model
class Received(Model):
    __response__ = True

    leaf: Leaf
    notes: dict[str, Any] = attrs.field(factory=dict)


@model(kw_only=False)
class Pair(Model):
    left: float
    right: float | None = None


@model
class Tree(Model):
    leaves: list[Leaf] = attrs.field(factory=list)
    best: Leaf | None = None
    colour: Colour = Colour.RED
    planted: datetime | None = None
    anything: Any = None
    ratio: float = 1


@model
class Locked(Model):
    door: str
    key: str | None = attrs.field(default=None, repr=False)
    ring: dict[str, str] | None = attrs.field(default=None, repr=False)


@model
class Circle(Model):
    type: Literal["circle"] = "circle"
    radius: float = 1


@model
class Square(Model):
    type: Literal["square"] = "square"
    side: float
    radius: float = 0


@model
class Dot(Model):
    weight: float = 1


@model(init=False)
class Shape(Model):
    __open__ = True

    type: str
    _extras: dict[str, Any] = attrs.field(factory=dict, init=False)

    def __init__(self, *, type: str, **extras: Any) -> None:  # noqa: A002
        self.__attrs_init__(type=type)
        self._extras.update(extras)

    def _fields_out(self) -> dict[str, Any]:
        return {"type": self.type, **self._extras}


@model
class SampleStarted(Model):
    __tag__ = ("event", "START")

    event: str


@model
class SampleEnded(Model):
    __tag__ = ("event", "END")

    event: str


Closed: TypeAlias = Circle | Square
WithOpen: TypeAlias = Circle | Shape
Untagged: TypeAlias = Dot | Shape
Event: TypeAlias = SampleStarted | SampleEnded


@model
class Drawing(Model):
    closed: Closed = Circle()
    with_open: WithOpen | None = None
    untagged: Untagged = Dot()
    events: list[Event] = attrs.field(factory=list)
    many: dict[str, Closed] = attrs.field(factory=dict)


@model
class Holder(Model):
    """A model with an array, like some models of the API."""

    values: Any = None
    other: Any = attrs.field(default=None, converter=lambda value: value)


# ---------------------------------------------------------------------------------------- construction
def test_fields_are_converted_and_checked_once_made() -> None:
    tree = Tree(
        leaves=({"size": "3"}, Leaf(size=4)), best={"size": 1.0}, colour="red", planted="2026-01-31T12:00:00Z"
    )
    assert tree.leaves == [Leaf(size=3), Leaf(size=4)]
    assert tree.best == Leaf(size=1)
    assert tree.colour is Colour.RED
    assert tree.planted == datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    assert type(tree.ratio) is float  # the default 1 is converted too


@pytest.mark.parametrize(
    "make",
    [
        lambda: Leaf(siez=3),
        lambda: Leaf(size=3, naem="x"),
        lambda: Leaf(),
        lambda: Leaf(3),
        lambda: Received(leaf=Leaf(size=1), new_field=1),
        lambda: Twig(3),
        lambda: Shape(),
        lambda: Shape("circle"),
    ],
)
def test_a_name_mistyped_missing_or_left_out_is_a_type_error(make: Any) -> None:
    with pytest.raises(TypeError):
        make()


def test_models_cannot_be_changed_nor_extended() -> None:
    leaf = Leaf(size=1)
    with pytest.raises(AttributeError):
        leaf.size = 2
    with pytest.raises(AttributeError):
        leaf.other = 2
    with pytest.raises(AttributeError):
        del leaf.size
    vars(leaf)["size"] = 2
    assert leaf == Leaf(size=1)


@pytest.mark.parametrize(
    ("make", "wrong", "meant", "known"),
    [
        (
            lambda: AdamParams(lr=1e-4),
            "AdamParams has no parameter 'lr'",
            "learning_rate",
            "learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm",
        ),
        (
            lambda: SamplingParams(temp=0.5),
            "SamplingParams has no parameter 'temp'",
            "temperature",
            "max_tokens, seed, stop, temperature, top_k, top_p",
        ),
        (
            lambda: Datum(input=ModelInput.empty()),
            "Datum has no parameter 'input'",
            "model_input",
            "model_input, loss_fn_inputs, model_input_spans, loss_fn_input_spans",
        ),
        (
            lambda: TensorData([1], "int64", colour=[1]),
            "TensorData has no parameter 'colour'",
            "",
            "data, dtype, shape, sparse_crow_indices, sparse_col_indices",
        ),
        (lambda: Twig(sise=1), "Twig has no parameter 'sise'", "size", "size, name, green"),
        (
            lambda: Leaf(size=1).model_copy(update={"nam": "x"}),
            "Leaf has no parameter 'nam'",
            "name",
            "size, name",
        ),
    ],
)
def test_a_mistyped_parameter_lists_the_known_ones(make: Any, wrong: str, meant: str, known: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    hint = f"did you mean {meant!r}? " if meant else ""
    assert str(caught.value) == f"{wrong}; {hint}it takes: {known}"
    assert caught.value.__context__ is None


def test_other_type_errors_of_a_constructor_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"'size'$"):
        Leaf()
    with pytest.raises(TypeError, match=r"write Leaf\(size=\.\.\.\)$"):
        Leaf(1)
    with pytest.raises(TypeError, match=r"^Datum\.loss_fn_inputs: expected a mapping"):
        Datum(ModelInput.empty(), loss_fn_inputs=[1])


def test_a_subclass_with_a_constructor_of_its_own_is_made_copied_and_pickled() -> None:
    sprout = Sprout(3)
    assert (sprout.size, sprout.name) == (3, "sprout")
    for again in (pickle.loads(pickle.dumps(sprout)), copy.copy(sprout), copy.deepcopy(sprout)):
        assert (type(again), again) == (Sprout, sprout)
    with pytest.raises(TypeError, match="did you mean 'name'"):
        Sprout(3, nane="x")


def test_many_threads_may_give_the_first_value() -> None:
    for _ in range(20):

        @model
        class Fresh(Model):
            key: str = attrs.field(repr=False)

        together = threading.Barrier(8)

        def refuse(made: Any = Fresh, together: threading.Barrier = together) -> str:
            together.wait(120)
            with pytest.raises(InvalidInputError) as caught:
                made(key=[SECRET])
            return str(caught.value)

        with ThreadPoolExecutor(8) as pool:
            refusals = {future.result(120) for future in [pool.submit(refuse) for _ in range(8)]}
        assert refusals == {"Fresh.key: cannot be a list; the value is not shown"}


# -------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Leaf(size=1.5), "Leaf.size: expected a whole number, got 1.5 (float)"),
        (lambda: Leaf(size=None), "Leaf.size: expected a whole number, got None (NoneType)"),
        (lambda: Tree(best={"size": []}), "Tree.best.size: expected a whole number, got [] (list)"),
        (
            lambda: Tree(leaves=[{"size": 1}, {"size": 2, "name": 3}]),
            "Tree.leaves[1].name: expected text, got 3 (int)",
        ),
        (lambda: Tree(leaves=[{}]), "Tree.leaves[0]: Leaf missing 1 required keyword-only argument: 'size'"),
        (
            lambda: Tree(best={"size": 1, "x": 2}),
            "Tree.best: Leaf has no parameter 'x'; it takes: size, name",
        ),
        (lambda: Tree(best={1: 2, "size": 1}), "Tree.best: Leaf keywords must be strings"),
        (lambda: Tree(best=5), "Tree.best: expected Leaf or a mapping of its fields, got int"),
        (lambda: Tree(colour="blue"), "Tree.colour: expected one of 'red', got 'blue' (str)"),
        (
            lambda: Drawing(many={"a": {"type": "square", "side": "x"}}),
            "Drawing.many['a'].side: expected a number, got 'x' (str)",
        ),
        (
            lambda: Drawing(closed={"type": "cube"}),
            "Drawing.closed.type: expected one of 'circle', 'square', got 'cube' (str)",
        ),
        (
            lambda: Drawing(closed=[1]),
            "Drawing.closed: expected Circle or Square or a mapping of its fields, got list",
        ),
        (lambda: Leaf.model_validate({"size": "x"}), "Leaf.size: expected a whole number, got 'x' (str)"),
        (
            lambda: model_from(Received, {"leaf": {"size": "x"}}, "$"),
            "$.leaf.size: expected a whole number, got 'x' (str)",
        ),
    ],
)
def test_a_refusal_names_the_place(make: Any, text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "arguments",
    [
        {"door": "front", "key": [SECRET]},
        {"door": "front", "key": {SECRET: 1}},
        {"door": "front", "ring": {"a": SECRET, "b": 5}},
        {"door": "front", "ring": {SECRET: 5}},
        {"door": "front", "ring": SECRET},
        {"door": 5, "key": SECRET},
    ],
)
def test_a_secret_is_in_no_refusal(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Locked(**arguments)
    error: BaseException | None = caught.value
    assert SECRET not in "".join(traceback.format_exception(error))
    while error is not None:
        assert SECRET not in repr(error)
        assert SECRET not in str(error)
        error = error.__context__


def test_a_secret_is_in_no_repr_but_in_the_dump() -> None:
    locked = Locked(door="front", key=SECRET, ring={"a": SECRET})
    assert repr(locked) == str(locked) == "Locked(door='front')"
    assert locked.key == SECRET
    assert locked.model_dump()["ring"] == {"a": SECRET}


# ---------------------------------------------------------------------------------------- unions, answers


def test_a_tag_selects_the_member_of_a_union() -> None:
    drawing = Drawing(
        closed={"type": "square", "side": 2},
        events=[{"event": "END"}, {"event": "START"}, SampleStarted(event="x")],
    )
    assert drawing.closed == Square(side=2)
    assert drawing.events == [
        SampleEnded(event="END"),
        SampleStarted(event="START"),
        SampleStarted(event="x"),
    ]
    assert Drawing(with_open=None).with_open is None


def test_without_a_tag_the_member_that_knows_most_of_the_fields_is_taken() -> None:
    assert Drawing(closed={"radius": 3}).closed == Circle(radius=3)
    assert Drawing(closed={"radius": 3, "side": 1}).closed == Square(radius=3, side=1)
    assert Drawing(closed={}).closed == Circle()
    assert Drawing(untagged={"weight": 2}).untagged == Dot(weight=2)
    with pytest.raises(InvalidInputError, match=r"^Drawing\.closed\.side: expected a number"):
        Drawing(closed={"radius": 3, "side": "x"})


def test_an_open_member_takes_what_the_others_do_not_know() -> None:
    assert Drawing(with_open={"type": "cube", "side": 1}).with_open == Shape(type="cube", side=1)
    assert Drawing(with_open={"type": "circle"}).with_open == Circle()
    grown = Drawing(with_open={"type": "circle", "hue": 7}).with_open
    assert grown == Shape(type="circle", hue=7)
    assert grown.model_dump() == {"type": "circle", "hue": 7}
    assert Drawing(untagged={"type": "dot"}).untagged == Shape(type="dot")
    with pytest.raises(InvalidInputError, match=r"^Drawing\.with_open\.type: "):
        Drawing(with_open={"type": None})


# --------------------------------------------------------------------------------------------- dumping
def full_tree() -> Tree:
    day = date(2026, 1, 31)
    anything = {"none": None, "moment": day, "colour": Colour.RED, "bytes": b"hi", "n": (1, None)}
    return Tree(
        leaves=[Leaf(size=1), Twig(size=2)],
        best=Leaf(size=3),
        planted=datetime(2026, 1, 31, tzinfo=timezone.utc),
        anything=anything,
    )


def test_a_dump_is_plain_values_in_declared_order() -> None:
    dumped = full_tree().model_dump()
    assert list(dumped) == ["leaves", "best", "colour", "planted", "anything", "ratio"]
    assert dumped["leaves"] == [{"size": 1, "name": "leaf"}, {"size": 2, "name": "twig", "green": True}]
    assert dumped["best"] == {"size": 3, "name": "leaf"}
    assert dumped["colour"] is Colour.RED
    assert dumped["planted"] == datetime(2026, 1, 31, tzinfo=timezone.utc)


def test_a_dump_for_json_is_json() -> None:
    dumped = full_tree().model_dump(mode="json")
    assert dumped["planted"] == "2026-01-31T00:00:00Z"
    assert type(dumped["colour"]) is str
    assert dumped["anything"] == {
        "none": None,
        "moment": "2026-01-31",
        "colour": "red",
        "bytes": "aGk=",
        "n": [1, None],
    }
    assert json.loads(full_tree().model_dump_json()) == dumped
    assert json.loads(full_tree().model_dump_json(indent=2)) == dumped


def test_json_text_is_compact_and_knows_no_nan() -> None:
    assert Pair(1, None).model_dump_json() == '{"left":1.0,"right":null}'
    assert Pair(1.5).model_dump_json(indent=1) == '{\n "left": 1.5,\n "right": null\n}'
    assert Pair(math.nan, math.inf).model_dump_json() == '{"left":null,"right":null}'
    assert (
        Tree(anything=[{"x": math.nan}]).model_dump_json(include={"anything"}) == '{"anything":[{"x":null}]}'
    )
    assert math.isnan(Pair(math.nan).model_dump(mode="json")["left"])
    assert Leaf(size=1, name="☃").model_dump_json() == '{"size":1,"name":"☃"}'


def test_fields_can_be_left_out_of_a_dump() -> None:
    tree = full_tree()
    assert list(tree.model_dump(include={"best", "ratio", "unknown"})) == ["best", "ratio"]
    assert list(tree.model_dump(exclude=["best", "leaves"])) == ["colour", "planted", "anything", "ratio"]
    assert tree.model_dump(include=["best", "ratio"], exclude={"ratio"}) == {
        "best": {"size": 3, "name": "leaf"}
    }
    assert "best" not in Tree().model_dump(exclude_none=True)
    # Nulls inside of values are the user's.
    assert tree.model_dump(exclude_none=True)["anything"]["none"] is None
    assert Tree().model_dump(exclude_defaults=True) == {}
    assert Tree(ratio=1.0, leaves=[]).model_dump(exclude_unset=True) == {}
    assert Tree(leaves=[Leaf(size=1)]).model_dump(exclude_defaults=True) == {"leaves": [{"size": 1}]}
    assert Pair(1.0, 2.0).model_dump(exclude_defaults=True) == {"left": 1.0, "right": 2.0}


@pytest.mark.parametrize("names", ["best", {"best": {"size"}}])
def test_nested_includes_are_not_mistaken_for_names(names: Any) -> None:
    with pytest.raises(TypeError, match="set of field names"):
        full_tree().model_dump(include=names)
    with pytest.raises(TypeError, match="set of field names"):
        full_tree().model_dump(exclude=names)


def test_arrays_are_dumped_as_lists_and_equal_no_default() -> None:
    holder = Holder(values=np.arange(3), other=np.zeros((2, 1)))
    assert holder.model_dump(exclude_defaults=True) == {"values": [0, 1, 2], "other": [[0.0], [0.0]]}
    assert Holder(values=np.float32(0.5)).model_dump()["values"] == 0.5
    assert Holder(values=range(3)).model_dump()["values"] == [0, 1, 2]


def test_a_model_is_read_like_one_of_the_reference_client() -> None:
    leaf = Leaf(size=3)
    assert vars(leaf) == leaf.__dict__ == dict(leaf) == leaf.dict() == {"size": 3, "name": "leaf"}
    assert list(full_tree()) == [(name, getattr(full_tree(), name)) for name in Tree.model_fields]
    assert list(Leaf.model_fields) == list(leaf.model_fields) == ["size", "name"]
    assert Model.model_fields == {}
    assert leaf.model_fields_set == {"size"}
    assert leaf.json() == leaf.model_dump_json(by_alias=True, round_trip=True, warnings=False)
    assert leaf.copy(update={"size": 4}) == Leaf(size=4)
    assert leaf.model_dump(by_alias=True, round_trip=True, warnings=False) == leaf.dict()
    assert Leaf.model_validate_json(leaf.json()) == Leaf.model_validate_json(leaf.json().encode()) == leaf
    for text in ("{", b"\xff"):
        with pytest.raises(InvalidInputError, match=r"^Leaf: .*JSON"):
            Leaf.model_validate_json(text)
    with pytest.raises(InvalidInputError, match=r"^Leaf: .*got list"):
        Leaf.model_validate_json("[]")
    assert vars(Locked(door="a", key=SECRET)).keys() == Locked.model_fields.keys()


def test_a_model_is_a_field_of_a_pydantic_model() -> None:
    pydantic = pytest.importorskip("pydantic")
    params = SamplingParams(max_tokens=3)
    example = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    config = pydantic.create_model("Config", sampling=(SamplingParams, ...), data=(list[Datum], []))
    made = config(sampling=params, data=[example])
    assert made.sampling is params
    assert config(sampling={"max_tokens": 3}, data=[example]) == made
    assert made.model_dump() == {"sampling": params.model_dump(), "data": [example.model_dump()]}
    assert "seed" not in made.model_dump(exclude_none=True)["sampling"]
    assert config.model_validate_json(made.model_dump_json()) == made
    assert pydantic.TypeAdapter(Tree).dump_python(Tree(colour="red"), mode="json")["colour"] == "red"
    assert pydantic.validate_call(as_annotated)({"size": 1}) == Leaf(size=1)
    with pytest.raises(pydantic.ValidationError, match=r"SamplingParams\.max_tokens: expected"):
        config(sampling={"max_tokens": "x"})


def as_annotated(leaf: Leaf) -> Leaf:
    return leaf


# ------------------------------------------------------------------------------- copies, equality, pickle
def test_a_copy_is_checked_like_a_new_one() -> None:
    tree = full_tree()
    assert tree.model_copy() == tree
    assert tree.model_copy(update={"ratio": 2}).ratio == 2.0
    assert tree.ratio == 1.0
    with pytest.raises(InvalidInputError, match=r"^Tree\.ratio: "):
        tree.model_copy(update={"ratio": "x"})
    with pytest.raises(TypeError):
        tree.model_copy(update={"ratoi": 2})


def test_models_compare_by_value_and_class() -> None:
    assert Leaf(size=1) == Leaf(size=1, name="leaf")
    assert Leaf(size=1) != Leaf(size=2)
    assert Leaf(size=1) != {"size": 1, "name": "leaf"}
    assert hash(Leaf(size=1)) == hash(Leaf(size="1"))
    assert len({Leaf(size=1), Leaf(size=1), Leaf(size=2)}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Tree())
    with pytest.raises(TypeError):
        sorted([Leaf(size=1), Leaf(size=2)])


# ----------------------------------------------------------------------------------------------- repr
def test_reprs_are_short_for_any_content() -> None:
    tree = Tree(
        leaves=[Leaf(size=n) for n in range(1000)],
        anything={"numbers": list(range(10**5)), "bytes": b"x" * 10**6, "array": np.zeros(10**5)},
    )
    assert len(repr(tree)) < 600
    assert "… 1000 items" in repr(tree)
    assert "<1000000 bytes>" in repr(tree)
    assert "array([100000], float64)" in repr(tree)
