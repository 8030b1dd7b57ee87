"""`Datum` converts inputs to tensors, checks provenance, and reports all problems at once."""

from __future__ import annotations

import copy
import pickle
from array import array as c_array
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support.values import for_each, long_lists, refusal

import tinker_sync
from tinker_sync import SampledSequence
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    Datum,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinker_sync.types.datum import count_trained

PROMPT = ModelInput.from_ints([1, 2, 3])


def tensor(name: str, value: Any) -> TensorData:
    return Datum(PROMPT, {name: value}).loss_fn_inputs[name]


# --------------------------------------------------------------------------------------- into tensors


WHOLE = ("i1", "u1", "i4", "u4", "i8", "u8", "?", ">i8")
REAL = ("f2", "f4", "f8", ">f4", "g")
TARGETS: list[Any] = [[5, 6], (5, 6), range(5, 7), [5.0, 6.0], ["5", 6], [np.int8(5), np.uint64(6)]]


@for_each(
    ("name", "value", "dtype", "cells"),
    [
        *[("target_tokens", value, "int64", [5, 6]) for value in TARGETS],
        *[("target_tokens", np.array([5, 6], dtype=kind), "int64", [5, 6]) for kind in REAL],
        *[("target_tokens", np.array([1, 0], dtype=kind), "int64", [1, 0]) for kind in WHOLE],
        *[("weights", np.array([1, 0], dtype=kind), "int64", [1, 0]) for kind in WHOLE],
        *[("mine", np.array([1, 0], dtype=kind), "int64", [1, 0]) for kind in WHOLE],
        *[("weights", np.array([0.5, 1], dtype=kind), "float32", [0.5, 1]) for kind in REAL],
        *[("mine", np.array([0.5, 1], dtype=kind), "float32", [0.5, 1]) for kind in REAL],
        ("mine", [1, 0], "int64", [1, 0]),
        ("mine", [True, False], "int64", [1, 0]),
        ("mine", [1, 0.5], "float32", [1, 0.5]),
        ("mine", ((1, 2), (3, 4)), "int64", [1, 2, 3, 4]),
        ("mine", [], "float32", []),
        ("weights", [], "float32", []),
        ("weights", [[], []], "float32", []),
        ("target_tokens", [], "int64", []),
        ("target_tokens", [[], []], "int64", []),
        ("weights", c_array("d", [0.5]), "float32", [0.5]),
        ("weights", memoryview(c_array("f", [0.5])), "float32", [0.5]),
        ("weights", np.array(0.5), "float32", [0.5]),
    ],
)
def test_the_name_and_the_numbers_decide_the_dtype(name: str, value: Any, dtype: str, cells: Any) -> None:
    found = tensor(name, value)
    assert (found.dtype, found.data, found.shape) == (dtype, cells, list(np.shape(value)))


@pytest.mark.parametrize(
    "value", [0.5, 3, True, None, "12", b"12", {1, 2}, object(), (i for i in [1]), np.float32(1)]
)
def test_other_values_raise_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^loss_fn_inputs\['weights'\]: expected a list"):
        tensor("weights", value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("target_tokens", [1, 2, 1.9], "[2]: expected a whole number, got 1.9"),
        ("target_tokens", np.array([1, 1.9]), "[1]: expected a whole number, got 1.9"),
        ("target_tokens", [1, np.nan], "[1]: expected a whole number, got nan"),
        ("target_tokens", [2**63], f"[0]: {2**63} does not fit int64"),
        ("target_tokens", np.array([2**63], dtype="u8"), f"[0]: {2**63} does not fit"),
        ("weights", [[1, 2], [3]], "[1]: is a row of 1 where loss_fn_inputs['weights'][0] is"),
        ("weights", [1, "x"], "[1]: expected a number, got 'x' (str)"),
        ("weights", [0, 1e39], "[1]: 1e+39 is too large for float32"),
        ("mine", np.array([1j]), ": expected numbers, got an array of complex128"),
        ("mine", {"data": [1.5], "dtype": "int64"}, ".data[0]: expected a whole number, got 1.5"),
        ("mine", {"data": [1], "dtpye": "int64"}, ": "),
        ("it's", [None, "x"], "[1]: expected a number"),
    ],
)
def test_lossy_conversions_are_refused_with_their_path(name: str, value: Any, message: str) -> None:
    assert refusal(tensor, name, value).startswith(f"loss_fn_inputs[{name!r}]{message}")


def test_inputs_must_be_a_mapping_with_text_keys() -> None:
    with pytest.raises(TypeError, match="names in text, got 1"):
        Datum(PROMPT, {1: [1]})
    for wrong in ([("weights", [1])], None, "weights"):
        with pytest.raises(TypeError, match="mapping"):
            Datum(PROMPT, wrong)
    inputs = MappingProxyType({"weights": [1, 1, 1]})
    assert Datum(PROMPT, inputs).loss_fn_inputs["weights"].shape == [3]


def test_arrays_are_shared_without_lists() -> None:
    ids = np.arange(2048, dtype=np.int32)
    targets = np.arange(2048)
    floats = {name: np.zeros(2048, dtype=np.float32) for name in ("weights", "advantages", "logprobs")}
    with long_lists() as made:
        datum = Datum(ModelInput.from_ints(ids), {"target_tokens": targets, **floats})
        datum.validate()
        assert repr(datum)
        assert hash(tuple(datum.loss_fn_inputs.values()))
        assert datum == pickle.loads(pickle.dumps(datum))
    assert made == []
    (chunk,) = datum.model_input.chunks
    assert isinstance(chunk, EncodedTextChunk)
    assert np.shares_memory(chunk.as_int32(), ids)
    for name, array in {"target_tokens": targets, **floats}.items():
        assert np.shares_memory(datum.loss_fn_inputs[name].to_numpy(), array)


# ------------------------------------------------------------------------------------------- provenance
RUN = SampledProvenanceSpan(sequence_id="s", length=3)


@pytest.mark.parametrize("kind", [PromptProvenanceSpan, SampledProvenanceSpan])
def test_spans_have_defaults_and_limits(kind: Any) -> None:
    span = kind(sequence_id="s", length=3)
    assert (span.sequence_id, span.offset, span.length) == ("s", 0, 3)
    assert kind(sequence_id="s", offset=0, length=0).length == 0
    assert span == copy.deepcopy(span) == pickle.loads(pickle.dumps(span))
    assert hash(span) == hash(copy.copy(span))
    assert repr(span) == f"{kind.__name__}(sequence_id='s', offset=0, length=3)"
    with pytest.raises(TypeError):
        kind("s", 0, 3)
    with pytest.raises(TypeError):
        kind(sequence_id="s")
    assert refusal(kind, sequence_id="", length=1).startswith(f"{kind.__name__}.sequence_id: ")
    assert refusal(kind, sequence_id="s", length=-1).startswith(f"{kind.__name__}.length: ")
    assert refusal(kind, sequence_id="s", length=1, offset=-1).startswith(f"{kind.__name__}.offset: ")
    assert refusal(kind, sequence_id="s", length=1.5).startswith(f"{kind.__name__}.length: ")
    assert refusal(kind, sequence_id=None, length=1).startswith(f"{kind.__name__}.sequence_id: ")


def test_spans_must_come_in_pairs_of_the_right_kind() -> None:
    datum = Datum(PROMPT, {}, [RUN], (RUN,))
    assert (datum.model_input_spans, datum.loss_fn_input_spans) == ([RUN], [RUN])
    for pair in (([RUN], None), (None, [RUN]), ([], None)):
        with pytest.raises(AssertionError, match="in pairs"):
            Datum(PROMPT, {}, *pair)
    with pytest.raises(TypeError, match=r"span 1 .*got dict"):
        Datum(PROMPT, {}, [RUN, {"sequence_id": "s", "length": 3}], [RUN])


def test_with_provenance_returns_a_checked_copy() -> None:
    plain = Datum(PROMPT, {"target_tokens": [2, 3, 4]})
    parts: Any = [PromptProvenanceSpan(sequence_id="p", length=1), RUN.model_copy(update={"length": 2})]
    told = plain.with_provenance(parts, [RUN])
    assert (told.model_input_spans, told.loss_fn_input_spans) == (parts, [RUN])
    assert plain.model_input_spans is None
    assert told.loss_fn_inputs["target_tokens"] is plain.loss_fn_inputs["target_tokens"]
    told.validate()
    for pair, field in (((parts[1:], [RUN]), "model_input"), (([RUN], parts[1:]), "loss_fn_inputs")):
        assert refusal(plain.with_provenance, *pair) == (
            f"with_provenance({field}): the runs cover 2 positions, the field has 3"
        )


def test_with_provenance_does_not_check_targets_of_other_ranks() -> None:
    short: Any = [SampledProvenanceSpan(sequence_id="s", length=2)]
    for targets in (
        {},
        {"target_tokens": [[1, 2], [3, 4], [5, 6]]},
        {"target_tokens": TensorData([1, 2], "int64")},
    ):
        told = Datum(PROMPT, targets).with_provenance([RUN], short)
        assert told.loss_fn_input_spans == short


# -------------------------------------------------------------------------------------------- validation
def problems(inputs: Any, prompt: ModelInput = PROMPT, *spans: Any) -> list[str]:
    return Datum(prompt, inputs, *spans).problems("data[3]")


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        {
            "target_tokens": [2, 3],
            "weights": [1.0, np.nan, 1.0],
            "advantages": [0.5],
            "logprobs": [-1.0, -np.inf],
            "clip_low_threshold": [np.inf, 1.0],
            "mine": [np.nan],
        },
        PROMPT,
        [SampledProvenanceSpan(sequence_id="s", length=1)],
        [SampledProvenanceSpan(sequence_id="s", length=9)],
    )
    assert found == [
        "data[3].loss_fn_inputs['target_tokens']: has length 2, model_input has 3",
        "data[3].loss_fn_inputs['weights']: has length 3, target_tokens has 2",
        "data[3].loss_fn_inputs['weights'][1]: expected a finite number, got nan",
        "data[3].loss_fn_inputs['advantages']: has length 1, target_tokens has 2",
        "data[3].loss_fn_inputs['logprobs'][1]: expected a finite number, got -inf",
        "data[3].model_input_spans: cover 1 positions of 3",
        "data[3].loss_fn_input_spans: cover 9 positions of 2",
    ]


@pytest.mark.parametrize("threshold", [[0.8], np.array([[0.8]]), np.array(0.8)])
def test_one_threshold_may_stand_for_all_tokens(threshold: Any) -> None:
    inputs = {"target_tokens": [2, 3, 4], "clip_low_threshold": threshold, "clip_high_threshold": threshold}
    assert problems(inputs) == []
    assert problems({**inputs, "clip_low_threshold": [0.8, 0.9]}) == [
        "data[3].loss_fn_inputs['clip_low_threshold']: has length 2, target_tokens has 3"
    ]


def test_validate_raises_all_problems() -> None:
    datum = Datum(PROMPT, {"target_tokens": [1], "weights": [np.nan]})
    with pytest.raises(InvalidInputError) as caught:
        datum.validate("data[3]")
    assert list(caught.value.problems) == datum.problems("data[3]")
    assert len(caught.value.problems) == 2
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    assert datum.problems()[0].startswith("datum.loss_fn_inputs")


@pytest.mark.parametrize("length", [1, 18, 2048])
def test_the_first_bad_number_is_named(length: int) -> None:
    weights = np.ones(length)
    weights[length - 1 :] = np.inf
    found = problems({"weights": weights}, ModelInput.from_ints(range(length)))
    assert found == [f"data[3].loss_fn_inputs['weights'][{length - 1}]: expected a finite number, got inf"]


@pytest.mark.parametrize(("row", "column", "bad"), [(4, 7, np.nan), (0, 0, np.inf), (8, 8, -np.inf)])
def test_bad_numbers_in_matrices_are_named(row: int, column: int, bad: float) -> None:
    dense = np.zeros((9, 9), dtype=np.float32)
    dense[2, 3], dense[row, column] = 1.0, bad
    sparse = TensorData.from_numpy_sparse(dense)
    assert sparse.is_sparse
    for weights in (dense, sparse):
        assert problems({"weights": weights}, ModelInput.from_ints(range(9))) == [
            f"data[3].loss_fn_inputs['weights'][{row}][{column}]: expected a finite number, got {bad}"
        ]


def test_lengths_are_compared_for_text_only() -> None:
    image = ImageChunk(data=b"", format="png", expected_tokens=1)
    unknown = ImageChunk(data=b"", format="png")
    for picture in (image, unknown):
        prompt = PROMPT.append(picture)
        assert problems({"target_tokens": [1] * 9}, prompt, [RUN], [RUN]) == [
            "data[3].loss_fn_input_spans: cover 3 positions of 9"
        ]
        assert problems({"target_tokens": [1] * 9, "weights": [1.0] * 8}, prompt) == [
            "data[3].loss_fn_inputs['weights']: has length 8, target_tokens has 9"
        ]


@pytest.mark.parametrize(
    "inputs",
    [
        {"target_tokens": [[1, 9], [2, 9], [3, 9]], "weights": [[1.0, 0.0]] * 3},
        {"target_tokens": [[1, 9], [2, 9], [3, 9]], "weights": [1.0, 1.0, 1.0]},
        {"target_tokens": TensorData([5], "int64", [3, 9], [0, 0, 0, 1], [4]), "weights": [1.0, 1.0, 1.0]},
        {"target_tokens": [[1, 2, 3]], "weights": [[1.0, 1.0, 1.0]]},
        {"target_tokens": [1, 2, 3], "weights": [[1.0, 1.0, 1.0]]},
        {"target_tokens": TensorData([1, 2, 3], "int64"), "weights": np.array(0.5)},
        {"target_tokens": np.array(1), "weights": [1.0] * 7},
        {"mine": [1.0] * 7, "reward": np.array(0.5)},
        {"weights": [1.0] * 7},
    ],
)
def test_unusual_shapes_are_accepted(inputs: Any) -> None:
    assert problems(inputs) == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"target_tokens": [[1, 9], [2, 9]], "weights": [1.0] * 3},
            [
                "['target_tokens']: has length 2, model_input has 3",
                "['weights']: has length 3, target_tokens has 2",
            ],
        ),
        (
            {"target_tokens": TensorData([5], "int64", [2, 9], [0, 0, 1], [4])},
            ["['target_tokens']: has length 2, model_input has 3"],
        ),
        (
            {
                "target_tokens": TensorData([5], "int64", [3, 9], [0, 0, 0, 1], [4]),
                "weights": np.zeros((2, 9)),
            },
            ["['weights']: has length 2, target_tokens has 3"],
        ),
        ({"target_tokens": []}, ["['target_tokens']: has length 0, model_input has 3"]),
    ],
)
def test_different_lengths_are_reported(inputs: Any, message: list[str]) -> None:
    assert problems(inputs) == [f"data[3].loss_fn_inputs{problem}" for problem in message]


# ------------------------------------------------------------------------------------------- being a value


def test_negative_targets_are_fine_where_the_weight_is_zero() -> None:
    prompt = ModelInput.from_ints([1, 2, 3])
    targets = {"target_tokens": [-100, -100, 4]}
    Datum(prompt, {**targets, "weights": [0, 0, 1]}).validate()
    [problem] = Datum(prompt, {**targets, "weights": [0, 1, 1]}).problems()
    assert problem.startswith("datum.loss_fn_inputs['target_tokens'][1]: expected 0 or more, got -100")
    [problem] = Datum(prompt, targets).problems()
    assert "['target_tokens'][0]" in problem


# --------------------- Conversions of types from and to text: `from_chat`, `text`, `trained_tokens`
CHAT = [{"role": "user", "content": "2 + 3?"}]


def tokenizer() -> tinker_sync.Tokenizer:
    return tinker_sync.get_tokenizer("tinker-sync/tiny")


def test_a_chat_becomes_a_prompt_for_the_next_turn() -> None:
    prompt = ModelInput.from_chat(CHAT, tokenizer())
    assert tokenizer().decode(prompt.to_ints()).endswith("<|im_start|>assistant\n")
    whole = ModelInput.from_chat(CHAT, tokenizer(), add_generation_prompt=False)
    assert prompt.to_ints()[: whole.length] == whole.to_ints()
    assert prompt.length > whole.length


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages: is empty"),
        ("2 + 3?", "messages: expected a list of dictionaries with role and content, got str"),
        ({"role": "user", "content": "a"}, r"expected a list of messages, got one; write \[message\]"),
        ({"id": 7, "messages": [{"role": "user", "content": "a"}]}, r"got a dictionary; give its 'messages'"),
        (
            [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "5"}]}],
            r"text in place of the list in messages\[1\]\['content'\]",
        ),
        (["2 + 3?"], r"messages\[0\]: expected a dictionary with role and content, got a str"),
        (
            [*CHAT, {"from": "gpt", "value": "5"}],
            r"messages\[1\]: has no 'role'; rename 'from' to 'role', 'value' to 'content', and 'gpt' to 'as",
        ),
        ([{"role": "user", "value": "5"}], r"messages\[0\]: has no 'content'; rename 'value' to 'content'"),
        ([{"content": "5"}], r"has no 'role'; a message is \{'role': 'user', 'content': '\.\.\.'\}"),
        ([{"role": 1, "content": "5"}], r"messages\[0\]\['role'\]: expected text, got 1"),
    ],
)
def test_what_is_no_chat_is_refused_with_the_remedy(messages: Any, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        ModelInput.from_chat(messages, tokenizer())
    with pytest.raises(InvalidInputError, match=complaint):
        tinker_sync.data.from_chat(messages, tokenizer())


def test_a_chat_to_train_on_needs_an_answer() -> None:
    with pytest.raises(InvalidInputError, match="only of role 'user'"):
        tinker_sync.data.from_chat(CHAT, tokenizer())


def test_the_text_of_a_sample() -> None:
    ids = tokenizer().encode("5<|im_end|>")
    sequence = SampledSequence("stop", tokens_np=np.array(ids, dtype=np.int32))
    assert sequence.text(tokenizer()) == "5"
    assert sequence.text(tokenizer(), skip_special_tokens=False) == "5<|im_end|>"


@pytest.mark.parametrize(
    ("inputs", "trained"),
    [
        ({"target_tokens": [2, 3, 4]}, [2, 3, 4]),
        ({"target_tokens": [2, 3, 4], "weights": [0, 0.5, 1]}, [3, 4]),
        ({"target_tokens": [2, 3, 4], "advantages": [0, -1, 0]}, [3]),
        ({"target_tokens": [2, 3, 4], "weights": [1, 0, 0], "advantages": [0, 1, 1]}, [2]),
        ({"target_tokens": [[2, 3], [4, 5], [6, 7]], "weights": [0, 1, 0]}, [4, 5]),
        ({"target_tokens": [[2, 3], [4, 5]], "weights": [[0, 1], [1, 0]]}, [3, 4]),
        ({}, []),
    ],
)
def test_trained_tokens(inputs: Any, trained: list[int]) -> None:
    assert Datum(ModelInput.from_ints([1, 2, 3]), inputs).trained_tokens == trained


@pytest.mark.parametrize("name", ["weights", "advantages"])
@pytest.mark.parametrize("targets", [[7], [7, 8], [[7, 8], [9, 10]]])
def test_a_scalar_decides_for_all_targets(name: str, targets: Any) -> None:
    for value, counted in ((0.5, np.ravel(targets).tolist()), (0.0, [])):
        inputs = {"target_tokens": targets, name: np.array(value, dtype=np.float32)}
        datum = Datum(ModelInput.from_ints(range(len(targets))), inputs)
        assert (datum.problems(), datum.trained_tokens) == ([], counted)
        assert count_trained([datum]) == (datum.model_input.length if counted else 0)


def test_trained_tokens_of_a_chat_are_those_of_the_assistant() -> None:
    datum = tinker_sync.data.from_chat([*CHAT, {"role": "assistant", "content": "5"}], tokenizer())
    assert tokenizer().decode(datum.trained_tokens) == "5<|im_end|>"


def test_weights_that_do_not_fit_are_named() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1, 1, 1]})
    with pytest.raises(InvalidInputError, match="2 targets and 3"):
        datum.trained_tokens  # noqa: B018
