"""Results that are too short, or that belong to another call, are refused; fitting ones pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinker_sync import types
from tinker_sync.errors import UnsupportedByServerError, WireError
from tinker_sync.runtime.answers import ExpectedOutputs, check_model
from tinker_sync.types import TensorData
from tinker_sync.wire.adapt import check_response, name_sequences


def datum(*tokens: int) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens)})


def scored(*sizes: int) -> types.ForwardBackwardOutput:
    return types.ForwardBackwardOutput(
        "", [{"logprobs": TensorData([-0.5] * size, "float32")} for size in sizes]
    )


class TestPasses:
    DATA = (datum(1, 2, 3), datum(4))

    def test_fitting_outputs_pass(self) -> None:
        expected = ExpectedOutputs.of(self.DATA, whole=True)
        for output in (scored(3, 1), types.ForwardBackwardOutput("", [{}, {}])):
            assert expected.check(output) is output

    @pytest.mark.parametrize("sizes", [(), (3,), (3, 1, 1), (2, 1), (1, 3), (3, 2)], ids=str)
    def test_others_are_refused(self, sizes: tuple[int, ...]) -> None:
        with pytest.raises(WireError, match="loss_fn_outputs"):
            ExpectedOutputs.of(self.DATA, whole=True).check(scored(*sizes))

    def test_older_servers_may_leave_out_targets_without_weight(self) -> None:
        lenient = ExpectedOutputs.of(self.DATA, whole=False)
        assert lenient.check(scored(2, 0))
        with pytest.raises(WireError, match=r"loss_fn_outputs\[1\].logprobs: expected 1 values"):
            lenient.check(scored(2, 2))

    def test_matrices_of_targets_may_come_flat(self) -> None:
        pairs = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": np.array([[1, 2], [3, 4]])})
        expected = ExpectedOutputs.of([pairs], whole=True)
        flat, square = TensorData([-1.0] * 4, "float32"), TensorData([-1.0] * 4, "float32", [2, 2])
        for tensor in (flat, square):
            expected.check(types.ForwardBackwardOutput("", [{"logprobs": tensor}]))
        with pytest.raises(WireError):
            expected.check(scored(3))

    def test_one_score_for_each_row_of_a_matrix_is_passed_on_with_one_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        many = types.Datum(
            types.ModelInput.from_ints([1, 2]), {"target_tokens": np.arange(34).reshape(2, 17)}
        )
        expected = ExpectedOutputs.of([many], whole=True)
        for _ in range(3):
            assert expected.check(scored(2)).loss_fn_outputs[0]["logprobs"].tolist() == [-0.5, -0.5]
        assert [record.getMessage() for record in caplog.records] == [
            "a datum has targets of shape ['n', 17], its logprobs have shape ['n']"
        ]
        for sizes in [(1,), (2, 2)]:
            with pytest.raises(WireError):
                expected.check(scored(*sizes))


def asked(tokens: int = 3, **options: Any) -> types.SampleRequest:
    prompt = types.ModelInput.from_ints(list(range(tokens)))
    return types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams(), **options)


def sampled(count: int = 1, length: int = 2, **options: Any) -> types.SampleResponse:
    tokens, logprobs = np.arange(length, dtype=np.int32), np.zeros(length, dtype=np.float32)
    sequence = types.SampledSequence("length", None, tokens, logprobs)
    return types.SampleResponse([sequence] * count, **options)


def topk(rows: int) -> types.TopkLogprobs:
    return types.TopkLogprobs(np.ones((rows, 2)), np.zeros((rows, 2)))


def floats(count: int) -> Any:
    return np.zeros(count, dtype=np.float32)


class TestSamples:
    @pytest.mark.parametrize("count", [0, 1, 2, 4])
    def test_the_number_of_sequences(self, count: int) -> None:
        with pytest.raises(WireError, match=f"sequences: expected 3, got {count}"):
            check_response(asked(num_samples=3), sampled(count))
        assert check_response(asked(num_samples=3), sampled(3)).sequences

    def test_a_sequence_has_as_many_scores_as_tokens(self) -> None:
        for logprobs in (None, floats(0), floats(2)):
            sequence = types.SampledSequence("stop", None, np.arange(2), logprobs)
            assert check_response(asked(), types.SampleResponse([sequence]))
        with pytest.raises(WireError, match=r"sequences\[0\].logprobs: expected 2 values, got 1"):
            check_response(
                asked(), types.SampleResponse([types.SampledSequence("stop", None, np.arange(2), floats(1))])
            )

    @pytest.mark.parametrize(
        ("request_", "response", "complaint"),
        [
            (asked(prompt_logprobs=True), sampled(prompt_logprobs_np=floats(1)), "prompt_logprobs"),
            (asked(prompt_logprobs=True), sampled(prompt_logprobs_np=floats(4)), "prompt_logprobs"),
            (
                asked(topk_prompt_logprobs=2),
                sampled(topk_prompt_logprobs_np=topk(1)),
                "topk_prompt_logprobs: expected 3 values, got 1",
            ),
            (
                asked(target_prompt_logprobs=TensorData([1, 2], "int64", [2, 1])),
                sampled(target_prompt_logprobs=TensorData([-1.0], "float32", [1, 1])),
                "target_prompt_logprobs: expected the shape",
            ),
            (
                asked(prompt_alt_tokens_k=2),
                sampled(
                    prompt_alt_tokens=types.PromptAltTokens(
                        TensorData([1, 2, 3, 4], "int64", [2, 2]), TensorData([0.0], "float32", [1, 1])
                    )
                ),
                "prompt_alt_tokens.logprobs: expected 4 values, got 1",
            ),
        ],
    )
    def test_scores_of_another_prompt(
        self, request_: types.SampleRequest, response: types.SampleResponse, complaint: str
    ) -> None:
        with pytest.raises(WireError, match=complaint):
            check_response(request_, response)

    @pytest.mark.parametrize(
        "options",
        [
            {"prompt_logprobs": True},
            {"topk_prompt_logprobs": 2},
            {"topk_sample_logprobs": 2},
            {"prompt_alt_tokens_k": 2},
            {"target_prompt_logprobs": TensorData([1, 2], "int64", [2, 1])},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_what_the_server_ignores(self, options: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedByServerError, match=f"ignored {next(iter(options))}"):
            check_response(asked(**options), sampled())

    def test_the_first_token_may_be_left_out(self) -> None:
        response = check_response(asked(prompt_logprobs=True), sampled(prompt_logprobs_np=floats(2)))
        assert response.prompt_logprobs == [None, 0.0, 0.0]
        alone = check_response(asked(1, prompt_logprobs=True), sampled())
        assert alone.prompt_logprobs == [None]

    def test_pictures_have_as_many_tokens_as_the_server_makes_of_them(self) -> None:
        from tinker_sync.types import EncodedTextChunk, ImageChunk

        chunks = [EncodedTextChunk(tokens=[1]), ImageChunk(data=b"", format="png")]
        request = types.SampleRequest(
            prompt=types.ModelInput(chunks=chunks),
            sampling_params=types.SamplingParams(),
            prompt_logprobs=True,
        )
        assert check_response(request, sampled(prompt_logprobs_np=floats(77)))

    def test_ids_for_other_sequences(self) -> None:
        for none in (None, []):
            assert name_sequences(sampled(), none).sequences[0].sequence_id is None
        with pytest.raises(WireError, match="2 ids for 1 sequences"):
            name_sequences(sampled(), ["a", "b"])


class TestOtherResults:
    def test_another_model(self) -> None:
        for model_id in (None, "", "m-1"):
            check_model("m-1", types.LoadWeightsResponse(model_id=model_id))
        with pytest.raises(WireError, match="another model"):
            check_model("m-1", types.LoadWeightsResponse(model_id="m-2"))
