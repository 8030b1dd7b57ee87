"""Results of numpy losses, and the errors for wrong ones."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from support.values import for_each

from tinker_sync.errors import InvalidInputError, MissingExtraError
from tinker_sync.losses import numpy_loss
from tinker_sync.losses.evaluate import make_evaluator

LOGPROBS = [np.array([-1.0, -2.0]), np.array([[-1.0], [-2.0], [-3.0]])]
ZEROS = [np.zeros(2), np.zeros((3, 1))]


def returning(value: Any) -> Any:
    @numpy_loss
    def my_loss(data: Any, logprobs: Any) -> Any:
        return value

    return make_evaluator(my_loss)([], LOGPROBS)


@pytest.mark.parametrize(
    "loss", [1.5, 3, np.float32(1.5), np.array(1.5), np.array([1.5]), np.int64(2)], ids=repr
)
def test_loss_is_one_number(loss: Any) -> None:
    found = returning((loss, {}, ZEROS)).loss
    assert (type(found), found) == (float, float(np.asarray(loss).reshape(())))


@for_each(
    ("returned", "complaint"),
    [
        (None, r"my_loss returned None; a numpy loss returns \(loss, metrics, gradients\)"),
        (1.0, "my_loss returned a float; a numpy loss"),
        ((1.0, {}), "my_loss returned a tuple of 2; a numpy loss"),
        ((np.ones(3), {}, ZEROS), r"a ndarray of shape \(3,\) as its loss; return one number"),
        (("1.0", {}, ZEROS), "a str as its loss"),
        ((None, {}, ZEROS), "None as its loss"),
        (([1.0], {}, ZEROS), "a list of 1 as its loss"),
        ((float("nan"), {}, ZEROS), r"a loss of nan; look for a logarithm of 0.*Nothing was trained"),
        ((np.inf, {}, ZEROS), "a loss of inf"),
        ((1.0, None, ZEROS), "None as metrics; return a dict, which may be empty"),
        (
            (1.0, {"a": np.ones(2)}, ZEROS),
            r"my_loss: metrics\['a'\]: has shape \(2,\); reduce it to one number",
        ),
        ((1.0, {}, None), "None as gradients; return a list with an array for each datum"),
        ((1.0, {}, {"a": 1}), "a dict as gradients"),
        ((1.0, {}, ZEROS[:1]), "returned 1 gradients for 2 data; return one for each, zeros where"),
        (
            (1.0, {}, [np.zeros(3), ZEROS[1]]),
            r"my_loss: gradients\[0\]: has shape \(3,\), logprobs\[0\] has \(2,\); return the derivative",
        ),
        ((1.0, {}, [ZEROS[0], np.zeros(3)]), r"gradients\[1\]: has shape \(3,\), logprobs\[1\] has \(3, 1\)"),
        ((1.0, {}, [0.0, ZEROS[1]]), r"gradients\[0\]: has shape \(\), logprobs\[0\] has \(2,\)"),
        ((1.0, {}, [None, ZEROS[1]]), r"gradients\[0\]: expected an array of real numbers, got None"),
        ((1.0, {}, [np.zeros(2, bool), ZEROS[1]]), "expected an array of real numbers, got .* of bool"),
        ((1.0, {}, [np.zeros(2, complex), ZEROS[1]]), "real numbers, got .* of complex128"),
        ((1.0, {}, [[[1.0], [1.0, 2.0]], ZEROS[1]]), r"gradients\[0\]: expected an array"),
        (
            (1.0, {}, [np.array([0.0, np.nan]), ZEROS[1]]),
            r"gradients\[0\]\[1\]: nan is not a finite float32, one of 1 such derivatives",
        ),
        (
            (1.0, {}, [ZEROS[0], np.array([[0.0], [np.inf], [-np.inf]])]),
            r"gradients\[1\]\[1\]\[0\]: inf .* one of 2",
        ),
        (
            (1.0, {}, [np.array([1e39, 0.0]), ZEROS[1]]),
            r"gradients\[0\]\[0\]: 1e\+39 is not a finite float32",
        ),
    ],
)
def test_wrong_results_are_explained(returned: Any, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        returning(returned)


def test_numeric_metrics_become_plain_numbers() -> None:
    given = {"a": np.float32(0.5), "b": np.array([2]), "c": 3, "d": True, 5: float("nan"), "e": "text"}
    found = returning((1.0, given, ZEROS)).metrics
    assert found.pop("5") != found.get("5")
    assert found == {"a": 0.5, "b": 2, "c": 3, "d": True, "e": "text"}
    assert [type(found[name]) for name in "abc"] == [float, int, int]


class TestKinds:
    def test_mark_decides_the_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)

        def unmarked(data: Any, logprobs: Any) -> Any:
            return 1.0, {}, ZEROS

        with pytest.raises(
            MissingExtraError,
            match=r"^the loss unmarked, .*: pip install torch, or write it in numpy, without torch, "
            r"and mark it with tinker_sync\.losses\.numpy_loss$",
        ):
            make_evaluator(unmarked)
        assert make_evaluator(numpy_loss(unmarked))([], LOGPROBS).loss == 1.0

    def test_methods_and_instances(self) -> None:
        class Mine:
            takes_numpy = True

            def __call__(self, data: Any, logprobs: Any) -> Any:
                return 2.0, {}, ZEROS

            @numpy_loss
            def method(self, data: Any, logprobs: Any) -> Any:
                return 3.0, {}, ZEROS

        assert make_evaluator(Mine())([], LOGPROBS).loss == 2.0
        assert make_evaluator(Mine().method)([], LOGPROBS).loss == 3.0

    def test_loss_must_be_callable(self) -> None:
        with pytest.raises(TypeError, match="expected a function or a LossHandle, got int"):
            make_evaluator(3)
