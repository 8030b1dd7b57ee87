"""The context of the user's trace on requests: with a small fake of OpenTelemetry's API, and with its SDK."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.tinker_stub import Asked, StubServer

from tinker_sync import (
    AdamParams,
    Datum,
    InvalidInputError,
    LossHandle,
    ModelInput,
    SamplingParams,
    ServiceClient,
)
from tinker_sync.runtime.raw import NO_EXTRA, Extra
from tinker_sync.types import CustomLossInput

DATA = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
TRACED = ("/asample", "/forward", "/forward_backward", "/optim_step")
TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def pretend(monkeypatch: pytest.MonkeyPatch, state: str = "vendor=a", **changes: Any) -> None:
    """Put a module with the one function that is used in the place of `opentelemetry.trace`."""
    given = {"trace_id": TRACE_ID, "span_id": SPAN_ID, "trace_flags": 1, "is_valid": True, **changes}
    trace_state = SimpleNamespace(to_header=lambda: state) if state else None
    context = SimpleNamespace(**given, trace_state=trace_state)
    module: Any = ModuleType("opentelemetry.trace")
    module.get_current_span = lambda: SimpleNamespace(get_span_context=lambda: context)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)


def requests_of_a_step(**extra: Any) -> list[Asked]:
    """Return all requests of a program that calls each method with a trace."""
    with StubServer() as stub, ServiceClient(base_url=stub.url, api_key="tml-key") as service:
        training = service.create_lora_training_client("stub/model", rank=8)
        sampling = service.create_sampling_client(base_model="stub/model")
        futures = [
            training.forward(DATA, "cross_entropy", **extra),
            training.forward_backward(DATA, "cross_entropy", **extra),
            training.optim_step(AdamParams(learning_rate=1e-3), **extra),
            sampling.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1), **extra),
        ]
        for future in futures:
            future.result()
        return list(stub.log)


def test_calls_in_a_span_carry_its_context_and_other_requests_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    requests = requests_of_a_step()
    traced = [each for each in requests if "traceparent" in each.headers]
    assert len(traced) == 4
    assert all(each.path.endswith(TRACED) for each in traced)
    assert {(each.headers["traceparent"], each.headers["tracestate"]) for each in traced} == {
        (PARENT, "vendor=a")
    }
    assert any(each.path.endswith("retrieve_future") for each in requests)
    assert not any("tracestate" in each.headers for each in requests if each not in traced)


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"state": ""}, {"traceparent": PARENT}),
        ({"is_valid": False}, {}),
        ({"trace_id": "not a number"}, {}),
        ({"state": "two\nlines"}, {}),  # it would end the header
    ],
)
def test_what_a_context_is_sent_as(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sent: dict[str, str]
) -> None:
    pretend(monkeypatch, **changes)
    assert dict(Extra.of("sample", None, None).headers) == sent


def test_headers_of_the_user_replace_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    own = {"TraceParent": "00-" + "1" * 32 + "-" + "2" * 16 + "-00"}
    sent = [each for each in requests_of_a_step(extra_headers=own) if "traceparent" in each.headers]
    assert [each.headers["traceparent"] for each in sent] == [own["TraceParent"]] * 4
    assert not any("tracestate" in each.headers for each in sent)
    both = Extra.of("sample", None, {"X-Team": "blue"}).headers
    assert dict(both) == {"traceparent": PARENT, "tracestate": "vendor=a", "X-Team": "blue"}


def test_the_setting_of_opentelemetry_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    for value, sent in (("none", False), ("b3", False), ("tracecontext,baggage", True)):
        monkeypatch.setenv("OTEL_PROPAGATORS", value)
        assert bool(Extra.of("sample", None, None).headers) is sent


def test_half_of_a_module_disturbs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    assert Extra.of("sample", None, None) is NO_EXTRA


def test_a_handle_of_a_custom_loss_is_as_good_in_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    inputs = (CustomLossInput(name="logprobs", rank=1),)
    handle = LossHandle("nll", inputs, "session-9", '{"inputs": [], "nodes": []}', "loss-9")
    with StubServer() as stub, ServiceClient(base_url=stub.url, api_key="tml-key") as service:
        training = service.create_lora_training_client("stub/model", rank=8).result()
        with pytest.raises(InvalidInputError, match="session-9"):  # it comes to the check of the session
            training.forward_backward(DATA, handle)
        with pytest.raises(TypeError, match="extras"):
            training.forward_backward(DATA, handle, extra_headers={})


def test_the_sdk_has_the_context_that_is_sent() -> None:
    api = pytest.importorskip("opentelemetry.trace")
    provider = pytest.importorskip("opentelemetry.sdk.trace").TracerProvider()
    assert Extra.of("sample", None, None) is NO_EXTRA  # imported, and no span
    with provider.get_tracer("tests").start_as_current_span("rollout") as span:
        sent = requests_of_a_step()
    context = span.get_span_context()
    expected = f"00-{api.format_trace_id(context.trace_id)}-{api.format_span_id(context.span_id)}-01"
    traced = [each for each in sent if "traceparent" in each.headers]
    # The SDK may set further flags, such as that of random ids.
    assert {each.headers["traceparent"][:-2] for each in traced} == {expected[:-2]}
    assert len(traced) == 4
