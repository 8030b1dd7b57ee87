"""The data of the two passes of a custom loss, and the log-probabilities read from the first."""

from __future__ import annotations

import numpy as np

from tinker_sync import types
from tinker_sync.losses.data import backward_data, forward_data, read_logprobs

CANDIDATES = np.array([[1, 2], [3, 4], [5, 6]])


def datum(**inputs: object) -> types.Datum:
    spans = [
        types.PromptProvenanceSpan(sequence_id="s", length=1),
        types.SampledProvenanceSpan(sequence_id="s", length=2),
    ]
    targets = [types.SampledProvenanceSpan(sequence_id="s", length=3)]
    return types.Datum(
        types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], **inputs}, spans, targets
    )  # type: ignore[dict-item]


def test_forward_data_keep_tokens_and_spans_only() -> None:
    given = datum(weights=[0.0, 1.0, 2.0], rewards=[1.0])
    gradient = np.array([0.5, -1.0, 0.0], dtype=np.float32)
    for made, weights in (
        (forward_data([given]), [0.0, 1.0, 2.0]),
        (backward_data([given], [gradient]), [-0.5, 1.0, 0.0]),
    ):
        assert made[0].model_input is given.model_input
        assert made[0].model_input_spans == given.model_input_spans
        assert made[0].loss_fn_input_spans == given.loss_fn_input_spans
        assert set(made[0].loss_fn_inputs) == {"target_tokens", "weights"}
        assert made[0].loss_fn_inputs["target_tokens"] is given.loss_fn_inputs["target_tokens"]
        assert made[0].loss_fn_inputs["weights"].data == weights


def test_gradients_are_sparse_when_smaller() -> None:
    wide = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": np.ones((3, 8), dtype=int)})
    gradient = np.zeros((3, 8), dtype=np.float32)
    gradient[1, 5] = 2.0
    weights = backward_data([wide], [gradient])[0].loss_fn_inputs["weights"]
    assert (weights.sparse_col_indices, weights.data, weights.shape) == ([5], [-2.0], [3, 8])
    assert not backward_data([wide], [gradient + 1])[0].loss_fn_inputs["weights"].is_sparse


def test_default_weights_have_the_layout_of_the_targets() -> None:
    dense = np.zeros((6, 6), dtype=int)
    dense[2, 3], dense[4, 1] = 7, 9
    targets = types.TensorData.from_numpy_sparse(dense)
    assert targets.is_sparse
    given = types.Datum(types.ModelInput.from_ints([1] * 6), {"target_tokens": targets})
    weights = forward_data([given])[0].loss_fn_inputs["weights"]
    assert weights.sparse_col_indices == targets.sparse_col_indices
    assert weights.sparse_crow_indices == targets.sparse_crow_indices
    assert (weights.dtype, weights.shape, set(weights.data)) == ("float32", targets.shape, {0.0})


def test_flat_logprobs_get_the_shape_of_the_targets() -> None:
    given = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": CANDIDATES})
    flat = types.TensorData(np.arange(-6.0, 0.0), "float32", [6])
    (found,) = read_logprobs(types.ForwardBackwardOutput("ArrayRecord", [{"logprobs": flat}]), [given])
    assert (found.dtype, found.tolist()) == (np.float64, [[-6, -5], [-4, -3], [-2, -1]])
