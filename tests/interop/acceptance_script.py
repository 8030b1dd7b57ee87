"""One script for both clients: every call of the clients, its results printed as canonical JSON.

    python acceptance_script.py tinker|tinker_sync URL SCRIPT...

Most scripts run against a stub that records requests. They consist of steps; before and after each step the
server gets a mark, which separates the steps in its log. No request is under way when a step ends, because
the script waits for every client that it makes.

The script `computed` runs against a server that really computes; `Computed` checks some results itself.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime as dt
import importlib
import importlib.util
import json
import logging
import math
import os
import pickle
import re
import sys
import urllib.request
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
from interop.conftest import FAILED_LOSS_ENDS_CLIENT, INFO_IS_A_REQUEST, shared_handle

WAIT_S = 120.0
CLOSE_S = 20.0
_ERRORS = (
    "APIConnectionError", "APIStatusError", "AuthenticationError", "BadRequestError", "NotFoundError",
    "PermissionDeniedError", "RequestFailedError", "TinkerError", "UnprocessableEntityError",
)  # fmt: skip
_BUILTIN_ERRORS = (AssertionError, RuntimeError, TypeError, ValueError)


class Run:
    """A run of some scripts: the client package and the server that they use, and their results."""

    def __init__(self, package: str, url: str, key: str = "tml-oracle") -> None:
        self.tinker = importlib.import_module(package)
        self.types = importlib.import_module(f"{package}.types")
        self.url, self.key = url, key
        self.results: list[tuple[str, Any]] = []
        self.step = ""

    def mark(self, name: str) -> None:
        """Send the server a mark, which it writes into its log. Some marks also change its behaviour."""
        with urllib.request.urlopen(f"{self.url}/api/v1/mark/{name}", timeout=WAIT_S):
            pass

    def service(self, **options: Any) -> Any:
        return self.tinker.ServiceClient(**{"base_url": self.url, "api_key": self.key, **options})

    def lenient(self) -> AbstractContextManager[None]:
        """Return a context in which the close of the reference client may take longer than its timeout.

        After it has finished the session, it sometimes waits for ever for its poll of all samples, which it
        has cancelled. From then on it sends nothing but heartbeats.
        """
        return nullcontext() if self.tinker.__name__ == "tinker_sync" else suppress(TimeoutError)

    def ready(self, client: Any) -> Any:
        """Return a client. If the call that made it returned a future of it, wait for that first."""
        return client.result(timeout=WAIT_S) if hasattr(type(client), "result") else client

    def note(self, name: str, value: Any) -> Any:
        """Record a result, and return it."""
        self.results.append((f"{self.step}.{name}" if self.step else name, plain(value)))
        return value

    def wait(self, name: str, future: Any) -> Any:
        return self.note(name, future.result(timeout=WAIT_S))

    def refused(self, name: str, call: Callable[[], Any]) -> None:
        """Record the classes and the attributes of the error that a call, or its result, raises."""
        try:
            value = call()
            if hasattr(value, "result"):
                value = value.result(timeout=WAIT_S)
        except Exception as error:  # noqa: BLE001  # its kind is the result
            self.note(name, self.kinds(error))
        else:
            self.note(name, {"raised nothing": plain(value)})

    def kinds(self, error: Exception) -> Any:
        public = [kind for kind in _ERRORS if isinstance(error, getattr(self.tinker, kind))]
        builtin = [kind.__name__ for kind in _BUILTIN_ERRORS if isinstance(error, kind)]
        # Some errors of this package are both a TinkerError and a builtin error, where those of the reference
        # client are builtin errors only.
        made = {"kinds": builtin or public}
        if "APIStatusError" in public:
            made["status"] = error.status_code
        if "RequestFailedError" in public:
            made["category"] = str(error.category.value)
            made["says it"] = "no room" in str(error)
        return made


# ------------------------------------------------------------------------------------ results as JSON


def plain(value: Any) -> Any:
    """Return a result of either package as JSON data. Floats stay exact; NaN and infinities become names."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "values": plain(value.tolist())}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, dict):
        # The reference client has no mean of the loss.
        return {str(name): plain(each) for name, each in value.items() if name != "loss:mean"}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return _model(value)


_PASS = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
_SAMPLE = (
    "sequences", "prompt_logprobs", "prompt_logprobs_np", "topk_prompt_logprobs", "target_prompt_logprobs",
    "prompt_cache_hit_tokens", "prompt_alt_tokens",
)  # fmt: skip
_SEQUENCE = ("stop_reason", "sequence_id", "tokens", "tokens_np", "logprobs", "logprobs_np", "topk_logprobs")
_FIELDS = {
    "ForwardBackwardOutput": _PASS,
    "SampleResponse": _SAMPLE,
    "SampledSequence": _SEQUENCE,
    "PromptAltTokens": ("tokens", "logprobs"),
    "TensorData": ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"),
}


def _model(value: Any) -> Any:
    name = type(value).__name__
    fields = _FIELDS.get(name)
    if fields is not None:
        return {field: plain(getattr(value, field)) for field in fields}
    if hasattr(value, "model_dump"):
        tree = plain(value.model_dump(mode="json"))
        # The reference client keeps the field `type` of some answers.
        return {"class": name, **{key: each for key, each in tree.items() if key != "type"}}
    return {"class": name}


# ------------------------------------------------------------------------------------ data of all kinds


def simple(run: Run, tokens: Iterable[int]) -> Any:
    ids = list(tokens)
    return run.types.Datum(
        model_input=run.types.ModelInput.from_ints(ids),
        loss_fn_inputs={"target_tokens": [*ids[1:], 7], "weights": [0.5] * len(ids)},
    )


def every_datum(run: Run) -> list[Any]:
    """Return a datum of each kind: lists, arrays, one and two dimensions, CSR, images, and spans."""
    types = run.types
    ids = [5, 6, 7, 8]
    prompt = types.ModelInput.from_ints(ids)
    targets = np.array([6, 7, 8, 9], dtype=np.int64)
    dense = types.TensorData(data=[1, 2, 3, 4, 5, 6, 7, 8], dtype="int64", shape=[4, 2])
    weights = types.TensorData(data=[0.25] * 8, dtype="float32", shape=[4, 2])
    csr = types.TensorData(
        data=[3, 4],
        dtype="int64",
        shape=[4, 3],
        sparse_crow_indices=[0, 1, 1, 2, 2],
        sparse_col_indices=[2, 0],
    )
    csr_weights = types.TensorData(
        data=[0.5, 1.5],
        dtype="float32",
        shape=[4, 3],
        sparse_crow_indices=[0, 1, 1, 2, 2],
        sparse_col_indices=[2, 0],
    )
    pictures = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1, 2]),
            types.ImageChunk(data=b"\x89PNG not really", format="png", expected_tokens=2),
            types.ImageChunk(data=b"\xff\xd8\xff not really", format="jpeg"),
            types.EncodedTextChunk(tokens=[3]),
        ]
    )
    spans = simple(run, ids).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id="s-1", offset=0, length=2),
            types.SampledProvenanceSpan(sequence_id="s-1", offset=0, length=2),
        ],
        loss_fn_inputs=[types.SampledProvenanceSpan(sequence_id="s-2", offset=3, length=4)],
    )
    importance = {
        "target_tokens": targets.astype(np.int32),
        "logprobs": np.linspace(-2, -1, 4, dtype=np.float64),
        "advantages": np.array([1, 0, -1, 0.5], dtype=np.float32),
    }
    return [
        simple(run, ids),
        types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets}),
        types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": dense, "weights": weights}),
        types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": csr, "weights": csr_weights}),
        types.Datum(model_input=prompt, loss_fn_inputs=importance),
        types.Datum(model_input=pictures, loss_fn_inputs={"target_tokens": [1, 2, 3, 4]}),
        spans,
        types.Datum(
            model_input=types.ModelInput.empty().append_int(2_147_483_647).append_int(0),
            loss_fn_inputs={"target_tokens": [3, 2**40], "weights": [1e-30, 3.4e38]},
        ),
    ]


# ------------------------------------------------------------------------------------ the service


def service(run: Run) -> None:
    step(run, "capabilities")
    client = run.service(display_name="acceptance", user_metadata={"run": "1"})
    run.note("models", client.get_server_capabilities())

    step(run, "clients")
    run.ready(client.create_sampling_client(base_model="stub/model"))
    run.refused("neither", client.create_sampling_client)
    run.refused(
        "nothing to train",
        lambda: client.create_lora_training_client(
            "stub/model", train_mlp=False, train_attn=False, train_unembed=False
        ),
    )

    step(run, "close")
    run.wait("closed", client.close("success", "all is well"))
    run.wait("closed again", client.close("errored"))
    run.refused("after the end", lambda: client.create_sampling_client(base_model="stub/model"))

    step(run, "copies of weights")
    with run.service(project_id="project-1") as copier:
        run.wait("copy", copier.copy_weights("tinker://run/weights/a"))
        path = "tinker://run/sampler_weights/s"
        run.wait("all", copier.copy_weights(path, ttl_seconds=3600, weights_access_token="tml-foreign"))
    with run.service() as homeless:
        run.refused("no project", lambda: homeless.copy_weights("tinker://run/weights/a"))

    step(run, "never used")
    with run.service():
        pass

    for name, error in (("fine", None), ("error", KeyError("a")), ("ctrl-c", KeyboardInterrupt())):
        step(run, f"with {name}")
        try:
            with run.service() as inner:
                run.ready(inner.create_sampling_client(base_model="stub/model"))
                if error is not None:
                    raise error
        except BaseException as seen:  # noqa: BLE001  # it must be the script's own
            run.note("seen", type(seen).__name__)


def environment(run: Run) -> None:
    """Check settings of the environment and the constructor, in the session and in every request."""
    os.environ.update(
        TINKER_PROJECT_ID="project-env",
        TINKER_TAGS="one,two",
        CLOUDFLARE_ACCESS_CLIENT_ID="cf-id",
        CLOUDFLARE_ACCESS_CLIENT_SECRET="cf-secret",
    )
    try:
        step(run, "environment")
        with run.service(default_headers_overrides={"X-Of-Mine": "yes", "X-Tinker-Other": "1"}) as client:
            run.ready(client.create_lora_training_client("stub/model"))
        step(run, "argument before environment")
        with run.service(project_id="project-arg", user_metadata={"who": "me", "why": ""}) as client:
            sampler = run.ready(client.create_sampling_client(base_model="stub/model"))
            prompt = run.types.ModelInput.from_ints([1, 2])
            run.wait("sample", sampler.sample(prompt, 1, run.types.SamplingParams(max_tokens=2)))
    finally:
        for name in [name for name in os.environ if name.startswith(("TINKER_", "CLOUDFLARE_"))]:
            if name != "TINKER_TELEMETRY":
                del os.environ[name]


# ------------------------------------------------------------------------------------ training


def training(run: Run) -> None:
    types = run.types
    with run.service() as client:
        step(run, "create")
        first = run.ready(client.create_lora_training_client(base_model="stub/model"))
        run.note("model", first.model_id)
        second = run.ready(
            client.create_lora_training_client(
                "stub/model",
                8,
                seed=3,
                train_mlp=False,
                train_unembed=False,
                user_metadata={"a": "b"},
                optimizer=types.DimuonOptimizerConfig(),
            )
        )
        run.note("second", second.model_id)
        run.note("info", first.get_info())
        passes(run, first, second)
        steps_of(run, first, second)
        saves(run, first)
        loads(run, first)


def passes(run: Run, first: Any, second: Any) -> None:
    step(run, "passes")
    data = every_datum(run)
    forward = first.forward(data[:2], "cross_entropy")
    backward = first.forward_backward(data, "cross_entropy")
    run.wait("forward", forward)
    run.wait("backward", backward)
    again = backward.result()
    run.note("the same object", again is backward.result(timeout=1))
    run.wait("future", backward.future())

    step(run, "losses")
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    run.wait("ppo", first.forward_backward(data[4:5], "ppo", config))
    mixed = {"kind": "soft", "beta": 0.1, "steps": 3}
    run.wait("texts", first.forward_backward(data[4:5], "importance_sampling", loss_fn_config=mixed))
    run.wait("other model", second.forward_backward(data=data[:1], loss_fn="cross_entropy"))
    run.refused("no data", lambda: first.forward_backward([], "cross_entropy"))

    step(run, "chunks")
    seven = first.forward_backward([simple(run, range(n, n + 3)) for n in range(1, 8)], "cross_entropy")
    optim = first.optim_step(types_adam(run))
    three = first.forward([simple(run, [n, n + 1]) for n in range(3)], "cross_entropy")
    run.wait("seven", seven)
    run.wait("optim", optim)
    run.wait("three", three)


def types_adam(run: Run) -> Any:
    return run.types.AdamParams(learning_rate=1e-3, beta1=0.8, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)


def steps_of(run: Run, first: Any, second: Any) -> None:
    types = run.types
    step(run, "steps")
    run.wait("default", first.optim_step(types.AdamParams()))
    run.wait("adam", first.optim_step(optim_params=types_adam(run)))
    run.wait("older name", first.optim_step(adam_params=types.AdamParams(learning_rate=2.0)))
    run.wait("dimuon", second.optim_step(types.DimuonParams(learning_rate=0.02, grad_clip_norm=2.0)))
    run.refused("none", first.optim_step)
    run.refused("both", lambda: first.optim_step(types.AdamParams(), adam_params=types.AdamParams()))
    run.refused("something else", lambda: first.optim_step({"learning_rate": 1.0}))


def saves(run: Run, client: Any) -> None:
    types = run.types
    step(run, "saves")
    run.wait("state", client.save_state("a"))
    state = client.save_state("b", ttl_seconds=3600, overwrite=True, user_metadata={"at": "step 3"})
    run.wait("state with all", state)
    run.note("its page", state.result().get_console_url())
    sampler = client.save_weights_for_sampler("s")
    run.wait("sampler", sampler)
    run.note("its pages", [sampler.result().get_console_url(), sampler.result().get_playground_url()])
    run.wait("sampler with all", client.save_weights_for_sampler("t", 7200, {"k": "v"}))
    run.wait("external", client.save_weights_external("e"))
    run.wait("external with all", client.save_weights_external("f", 3600, ["age1xyz", "age1abc"]))
    run.refused("a failure of the user", lambda: client.save_state("fail-user"))
    run.refused("a failure of the server", lambda: client.save_state("fail-server"))
    run.refused("a failure of another kind", lambda: client.save_state("fail-moon"))

    step(run, "samplers")
    prompt = types.ModelInput.from_ints([1, 2, 3])
    made = {
        "ephemeral": client.save_weights_and_get_sampling_client(),
        "named": client.create_sampling_client("tinker://run/sampler_weights/s"),
        "stable": client.save_weights_and_get_sampling_client(record_stability_info=True),
    }
    for name, sampling in made.items():
        run.wait(name, run.ready(sampling).sample(prompt, 1, types.SamplingParams(max_tokens=3)))


def loads(run: Run, client: Any) -> None:
    step(run, "loads")
    run.wait("state", client.load_state("tinker://run/weights/a"))
    run.wait("token", client.load_state("tinker://run/weights/a", weights_access_token="tml-foreign"))
    run.wait("with optimizer", client.load_state_with_optimizer("tinker://run/weights/a"))


def refusals(run: Run) -> None:
    """Record the errors of calls that the server refuses."""
    with run.service() as client:
        step(run, "refusals")
        trainer = run.ready(client.create_lora_training_client("stub/model"))
        for status in (400, 401, 403, 404, 422) if INFO_IS_A_REQUEST else ():
            run.mark(f"refuse/{status}/get_info")
            run.refused(f"get_info {status}", trainer.get_info)
        run.mark("refuse/422/optim_step")
        run.refused("optim_step", lambda: trainer.optim_step(run.types.AdamParams()))
        run.mark("refuse/404/create_model")
        run.refused("create_model", lambda: client.create_lora_training_client("stub/model"))
        run.mark("refuse/400/create_sampling_session")
        run.refused("sampling session", lambda: client.create_sampling_client(base_model="stub/model"))
        sampler = run.ready(client.create_sampling_client(base_model="stub/model"))
        run.mark("refuse/422/asample")
        prompt = run.types.ModelInput.from_ints([1])
        run.refused("sample", lambda: sampler.sample(prompt, 1, run.types.SamplingParams(max_tokens=1)))


# ------------------------------------------------------------------------------------ tokenizers


def tokenizer(run: Run) -> None:
    with run.service() as client:
        step(run, "tokenizer")
        trainer = run.ready(client.create_lora_training_client("stub/model"))
        made = trainer.get_tokenizer()
        ids = run.note("tokens", list(made.encode("one and one is two", add_special_tokens=False)))
        run.note("text", made.decode(ids))


# ------------------------------------------------------------------------------------ losses


def losses(run: Run) -> None:
    """Train with custom losses. It needs torch."""
    with run.service() as client:
        step(run, "losses, create")
        trainer = run.ready(client.create_lora_training_client("stub/model"))
        traced_losses(run, client, custom_losses(run, client, trainer))


def custom_losses(run: Run, client: Any, trainer: Any) -> Any:
    """Train with losses that this process computes. Return a training client that still works."""
    import torch

    def squares(data: Any, logprobs: Any) -> Any:
        loss = torch.cat([each.reshape(-1) for each in logprobs]).square().sum()
        return loss, {"squares": float(loss.detach()) / len(data)}

    def broken(data: Any, logprobs: Any) -> Any:
        raise ValueError("no")

    types = run.types
    data = every_datum(run)
    step(run, "custom losses")
    run.wait("with weights", trainer.forward_backward_custom([data[0], data[6]], squares))
    run.wait("without", trainer.forward_backward_custom(data=[data[1], data[4]], loss_fn=squares))
    run.wait(
        "of several", trainer.forward_backward_custom([simple(run, [n, n + 1]) for n in range(5)], squares)
    )
    run.wait("step", trainer.optim_step(types.AdamParams()))

    step(run, "custom losses of candidates")
    wide = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7, 8]),
        loss_fn_inputs={"target_tokens": torch.arange(1, 9).reshape(4, 2)},
    )
    run.wait("dense", trainer.forward_backward_custom([wide], squares))
    run.wait(
        "mostly zero", trainer.forward_backward_custom([wide], lambda _, p: (p[0][0, 1] + 0 * p[0].sum(), {}))
    )

    step(run, "custom losses that fail")
    first = data[:1]
    bare = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={})
    run.refused("no targets", lambda: trainer.forward_backward_custom([bare], squares))
    run.refused("another input", lambda: trainer.forward_backward_custom(first, squares, loss_type_input="x"))
    constant = torch.ones(1, requires_grad=True)
    for name, loss in {"an error": broken, "no gradient": lambda *_: (constant.sum(), {})}.items():
        passed = partial(trainer.forward_backward_custom, first, loss)
        run.refused(name, passed)
        if FAILED_LOSS_ENDS_CLIENT:
            trainer = run.ready(client.create_lora_training_client("stub/model"))
    run.wait("and on", trainer.optim_step(types.AdamParams()))
    return trainer


def traced_losses(run: Run, client: Any, trainer: Any) -> None:
    import torch

    def nll(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/nll:sum": loss, "custom/most:mean": torch.max(logprobs)}

    def mean(logprobs: Any) -> Any:
        return torch.nn.functional.softplus(logprobs).mean(), {}

    step(run, "traced losses")
    ranks = {"logprobs": 1, "weights": 1}
    handle = client.create_custom_loss(nll, ranks).result(timeout=WAIT_S)
    other = client.create_custom_loss(fn=mean, input_ranks={"logprobs": 1}).result(timeout=WAIT_S)
    for each in (handle, other):
        inputs = [(one.name, one.rank) for one in each.inputs]
        run.note(each.name, [each.session_id, each.loss_id, inputs, each.input_names])
    run.refused("twice", lambda: client.create_custom_loss(nll, ranks))
    run.refused("ranks", lambda: client.create_custom_loss(nll, {"logprobs": 1}))
    run.refused(
        "no pair", lambda: client.create_custom_loss(lambda logprobs: logprobs.sum(), {"logprobs": 1})
    )
    data = [simple(run, [n, n + 1, n + 2]) for n in range(3)]
    run.wait("pass", trainer.forward_backward_custom(data, handle))
    run.wait("other pass", trainer.forward_backward_custom(data, other))
    run.refused("no weights", lambda: trainer.forward_backward_custom(every_datum(run)[1:2], handle))
    foreign = dataclasses.replace(handle, session_id="other") if dataclasses.is_dataclass(handle) else None
    if foreign is None:
        import attrs

        foreign = attrs.evolve(handle, session_id="other")
    run.refused("another session", lambda: trainer.forward_backward_custom(data, foreign))


# ------------------------------------------------------------------------------------ checkpoints


def from_state(run: Run) -> None:
    path = "tinker://run/weights/a"
    with run.service() as client:
        makers = {
            "weights": client.create_training_client_from_state,
            "with optimizer": client.create_training_client_from_state_with_optimizer,
        }
        for name, make in makers.items():
            step(run, name)
            use(run, run.ready(make(path)))
            step(run, f"{name}, all")
            options: dict[str, Any] = {
                "base_model": "stub/other",
                "user_metadata": {"from": "a"},
                "weights_access_token": "tml-foreign",
            }
            if name == "weights":
                options["optimizer"] = run.types.DimuonOptimizerConfig()
            use(run, run.ready(make(path, **options)))


def use(run: Run, client: Any) -> None:
    run.note("model", client.model_id)
    run.wait("pass", client.forward_backward([simple(run, [1, 2, 3])], "cross_entropy"))
    run.wait("step", client.optim_step(run.types.AdamParams()))


# ------------------------------------------------------------------------------------ sampling


def sampling(run: Run) -> None:
    types = run.types
    client = run.service()
    step(run, "samplers")
    sampler = run.ready(client.create_sampling_client(base_model="stub/model"))
    by_path = run.ready(client.create_sampling_client("tinker://run/sampler_weights/s"))
    both = run.ready(
        client.create_sampling_client(
            model_path="tinker://run/sampler_weights/s",
            base_model="stub/model",
            record_stability_info=True,
        )
    )
    run.note("base models", [each.get_base_model() for each in (sampler, by_path, both)])
    samples(run, sampler, both)
    scores(run, sampler)
    elsewhere(run, sampler, both)
    step(run, "a crowd")
    prompts = [types.ModelInput.from_ints([n, n + 1]) for n in range(40)]
    params = types.SamplingParams(max_tokens=2)
    crowd = [by_path.sample(prompt, 1, params) for prompt in prompts]
    run.note("tokens", [future.result(timeout=WAIT_S).sequences[0].tokens for future in crowd])
    with run.lenient():
        client.close("success").result(timeout=CLOSE_S)


def samples(run: Run, sampler: Any, stable: Any) -> None:
    types = run.types
    prompt = types.ModelInput.from_ints([11, 12, 13, 14])

    step(run, "parameters")
    for name, params in {
        "default": types.SamplingParams(),
        "all": types.SamplingParams(
            max_tokens=5, seed=17, stop=["\n", "END"], temperature=0.7, top_k=40, top_p=0.9
        ),
        "text": types.SamplingParams(max_tokens=1, stop="END"),
        "tokens": types.SamplingParams(max_tokens=1, stop=[1, 2]),
        "no stop": types.SamplingParams(max_tokens=1, stop=[]),
        "greedy": types.SamplingParams(max_tokens=2, temperature=0, top_k=1, top_p=1),
    }.items():
        run.wait(name, sampler.sample(prompt, 1, params))

    step(run, "options")
    params = types.SamplingParams(max_tokens=3)
    run.wait("many", sampler.sample(prompt=prompt, num_samples=4, sampling_params=params))
    run.wait("prompt", sampler.sample(prompt, 1, params, include_prompt_logprobs=True))
    run.wait("topk prompt", sampler.sample(prompt, 1, params, True, 2))
    run.wait("topk sampled", sampler.sample(prompt, 2, params, topk_sample_logprobs=3))
    targets = types.TensorData(data=[1, 2, -1, 3, 4, 5], dtype="int64", shape=[3, 2])
    run.wait("targets", sampler.sample(prompt, 1, params, target_prompt_logprobs=targets))
    run.wait("alternatives", sampler.sample(prompt, 1, params, prompt_alt_tokens_k=2))
    run.wait(
        "last", sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2)
    )
    run.wait("all of it", stable.sample(prompt, 2, params, True, 2, 2, targets, 1, 2))

    step(run, "prompts")
    pictures = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1, 2]),
            types.ImageChunk(data=b"\x89PNG not really", format="png", expected_tokens=2),
            types.ImageChunk(data=b"\xff\xd8\xff not really", format="jpeg"),
            types.ImageAssetPointerChunk(format="png", location="s3://somewhere/a.png", expected_tokens=4),
        ]
    )
    run.wait("pictures", sampler.sample(pictures, 1, params))
    run.wait("long", sampler.sample(types.ModelInput.from_ints(list(range(3000))), 1, params))

    step(run, "arguments")
    for name, options in {
        "floats": {"target_prompt_logprobs": types.TensorData([1.0], dtype="float32", shape=[1, 1])},
        "one dimension": {"target_prompt_logprobs": types.TensorData([1], dtype="int64", shape=[1])},
        "below zero": {"prompt_alt_tokens_k": -1},
        "last of none": {"prompt_logprobs_last_n": 1},
        "last 0": {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 0},
    }.items():
        run.refused(name, lambda options=options: sampler.sample(prompt, 1, params, **options))


def scores(run: Run, sampler: Any) -> None:
    step(run, "scores")
    prompt = run.types.ModelInput.from_ints([21, 22, 23])
    run.wait("all", sampler.compute_logprobs(prompt))
    run.wait("last", sampler.compute_logprobs(prompt, 1))


def elsewhere(run: Run, sampler: Any, stable: Any) -> None:
    prompt = run.types.ModelInput.from_ints([31, 32])
    params = run.types.SamplingParams(max_tokens=2)

    step(run, "handle")
    handle = stable.get_sampler_handle()
    state = json.loads(base64.urlsafe_b64decode(handle))
    state["holder"]["client_config"].pop("tinker_sync", None)  # only this client writes it
    state["holder"]["base_url"] = "the server" if state["holder"]["base_url"] == run.url else "elsewhere"
    run.note("content", shared_handle(state))
    os.environ["TINKER_API_KEY"] = "tml-oracle"
    try:
        copy = run.tinker.SamplingClient.from_sampler_handle(handle)
        run.wait("of it", copy.sample(prompt, 1, params))
        run.wait("of it, second", copy.sample(prompt, 1, params))
        step(run, "handle with another key")
        other = run.tinker.SamplingClient.from_sampler_handle(handle, api_key="tml-another")
        run.wait("of it", other.sample(prompt, 1, params))
        step(run, "pickle")
        pickled = pickle.loads(pickle.dumps(sampler))
        run.wait("of it", pickled.sample(prompt, 1, params))
        run.wait("scores", pickled.compute_logprobs(prompt))
    finally:
        del os.environ["TINKER_API_KEY"]


def foreign_handle(run: Run) -> None:
    """Sample with a handle of the other client, which the environment variable `A_HANDLE` has."""
    step(run, "foreign handle")
    client = run.tinker.SamplingClient.from_sampler_handle(os.environ["A_HANDLE"], api_key="tml-oracle")
    prompt = run.types.ModelInput.from_ints([1, 2, 3])
    run.wait("sample", client.sample(prompt, 1, run.types.SamplingParams(max_tokens=3)))
    run.note("base model", client.get_base_model())


def a_handle(run: Run) -> None:
    """Print the handle of a sampling client, and keep that client until standard input ends."""
    client = run.service()
    sampler = run.ready(client.create_sampling_client(base_model="stub/model"))
    say(sampler.get_sampler_handle())
    sys.stdin.read()


# ------------------------------------------------------------------------------------ asynchronous methods


def twins(run: Run) -> None:
    """Call every `..._async` method once, in one event loop."""

    async def main() -> None:
        client = run.service()
        step(run, "twins of the service")
        run.note("models", await client.get_server_capabilities_async())
        trainer = await client.create_lora_training_client_async("stub/model", rank=4)
        sampler = await client.create_sampling_client_async(base_model="stub/model")
        await twins_of_training(run, trainer)
        await twins_of_sampling(run, sampler)
        step(run, "twins of checkpoints")
        path = "tinker://run/weights/a"
        one = await client.create_training_client_from_state_async(path)
        two = await client.create_training_client_from_state_with_optimizer_async(path)
        run.note("models", [one.model_id, two.model_id])
        step(run, "twins end")
        with run.lenient():
            await asyncio.wait_for(client.close("success"), CLOSE_S)

    asyncio.run(main())


async def twins_of_training(run: Run, trainer: Any) -> None:
    types = run.types
    step(run, "twins of training")
    data = [simple(run, [1, 2, 3])]
    run.note("forward", await (await trainer.forward_async(data, "cross_entropy")))
    backward = await trainer.forward_backward_async(data, "cross_entropy")
    optim = await trainer.optim_step_async(types.AdamParams())
    run.note("backward", await backward.result_async())
    run.note("optim", await optim)
    if importlib.util.find_spec("torch"):
        custom = await trainer.forward_backward_custom_async(data, lambda _, p: (p[0].sum(), {"a": 1.0}))
        run.note("custom", await custom)
    run.note("state", await (await trainer.save_state_async("a")))
    run.note("sampler", await (await trainer.save_weights_for_sampler_async("s")))
    run.note("external", await (await trainer.save_weights_external_async("e")))
    run.note("load", await (await trainer.load_state_async("tinker://run/weights/a")))
    run.note("load all", await (await trainer.load_state_with_optimizer_async("tinker://run/weights/a")))
    run.note("info", await trainer.get_info_async())
    prompt = types.ModelInput.from_ints([1, 2])
    params = types.SamplingParams(max_tokens=2)
    ephemeral = await trainer.save_weights_and_get_sampling_client_async()
    run.note("ephemeral", await ephemeral.sample_async(prompt, 1, params))
    named = await trainer.create_sampling_client_async("tinker://run/sampler_weights/s")
    run.note("named", await named.sample_async(prompt, 1, params))


async def twins_of_sampling(run: Run, sampler: Any) -> None:
    types = run.types
    step(run, "twins of sampling")
    prompt = types.ModelInput.from_ints([3, 4, 5])
    run.note("sample", await sampler.sample_async(prompt, 2, types.SamplingParams(max_tokens=2)))
    run.note("scores", await sampler.compute_logprobs_async(prompt))
    run.note("base model", await sampler.get_base_model_async())


# ------------------------------------------------------------------------------------ a server that computes

BASE = "tinker-sync/tiny"
HOUR = dt.timedelta(hours=1)
# The id of a promise contains the number of earlier promises. This number is masked, because the clients need
# different numbers of requests to make a model.
_ID = re.compile(r"req-[0-9a-f]{8}-\d+")
_COPY = re.compile(r":copy:[0-9a-f-]{36}")
_MOMENTS = frozenset(
    {"time", "last_request_time", "expires_at", "created_at", "timestamp", "bucket_start", "bucket_end"}
)


class Computed(Run):
    """A run of every call that has an endpoint, against a server that really computes.

    Args:
        package: "tinker" or "tinker_sync".
        url: the address of the server.
        key: its key.
        newer: True if the server has the newest protocol, False if it takes JSON only.
        exchange: True if the server exchanges keys for tokens.
    """

    def __init__(
        self, package: str, url: str, key: str, *, newer: bool = True, exchange: bool = True
    ) -> None:
        super().__init__(package, url, key)
        self.newer, self.exchange = newer, exchange
        self.own = package != "tinker"

    def note(self, name: str, value: Any) -> Any:
        self.results.append((name, without_chance(plain(value))))
        return value

    def refused(self, name: str, call: Callable[[], Any]) -> None:
        super().refused(name, call)
        assert "raised nothing" not in self.results[-1][1], self.results[-1]

    def datum(self, tokens: list[int], **inputs: Any) -> Any:
        given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
        return self.types.Datum(
            model_input=self.types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], **given},
        )

    def loss(self, client: Any, data: list[Any]) -> float:
        passed = client.forward(data, "cross_entropy").result(timeout=WAIT_S)
        found: float = passed.metrics["loss:sum"]
        return found

    def run(self) -> list[tuple[str, Any]]:
        with self.service(display_name="acceptance", user_metadata={"run": "1"}, project_id="p-1") as client:
            self.note("capabilities", client.get_server_capabilities())
            trainer = self.ready(
                client.create_lora_training_client(BASE, rank=4, seed=3, user_metadata={"a": "b"})
            )
            self.training(client, trainer)
            self.checkpoints(client, trainer)
            self.sampling(client, trainer)
            self.refusals(client, trainer)
            if self.newer:
                self.custom(client, trainer)
                self.rest(client, trainer)
                self.admin()
        return self.results

    def training(self, client: Any, trainer: Any) -> None:
        types = self.types
        info = self.note("info", trainer.get_info())
        assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (BASE, 4, True)
        data = [self.datum([5, 6, 7, 8, 9]), self.datum([20, 21, 22])]
        before = self.wait("forward", trainer.forward(data, "cross_entropy")).metrics["loss:sum"]
        losses = []
        for step in range(8):
            backward = trainer.forward_backward(data, "cross_entropy")
            optim = trainer.optim_step(types.AdamParams(learning_rate=0.02, grad_clip_norm=5.0))
            losses.append(backward.result(timeout=WAIT_S).metrics["loss:sum"])
            self.wait(f"step {step}", optim)
        self.note("losses", losses)
        assert losses[0] == before
        assert losses[-1] < 0.5 * losses[0], losses
        tokens = [30, 31, 32, 33]
        scored = trainer.forward([self.datum(tokens)], "cross_entropy").result(timeout=WAIT_S)
        logprobs = np.asarray(scored.loss_fn_outputs[0]["logprobs"].to_numpy(), dtype=np.float32)
        inputs = {"logprobs": logprobs, "advantages": np.array([1.0, -0.5, 2.0], dtype=np.float32)}
        clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
        for loss, config in {
            "importance_sampling": None, "ppo": clip, "cispo": None, "dro": {"beta": 0.1}, "gspo": clip,
        }.items():  # fmt: skip
            if loss != "gspo":
                given = [self.datum(tokens, **inputs)]
            elif self.newer:  # other servers lack the input of this loss
                given = [self.datum(tokens, **inputs, sequence_ratio_mask=np.ones(3, dtype=np.float32))]
            else:
                continue
            self.wait(loss, trainer.forward_backward(given, loss, loss_fn_config=config))
        self.wait("after the losses", trainer.optim_step(types.AdamParams(learning_rate=1e-4)))
        other = self.ready(client.create_lora_training_client(BASE, 2, train_mlp=False, train_unembed=False))
        self.wait("other model", other.forward_backward(data, "cross_entropy"))
        # A batch of many chunks, and a step that is submitted before its result has arrived.
        many = [self.datum([n % 90 + 1, *range(1, n % 7 + 3)]) for n in range(40)]
        backward = trainer.forward_backward(many, "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
        self.wait("many", backward)
        self.wait("step of many", step)

    def checkpoints(self, client: Any, trainer: Any) -> None:
        data = [self.datum([5, 6, 7, 8, 9])]
        state = self.wait("save", trainer.save_state("first"))
        self.wait("save all", trainer.save_state("second", ttl_seconds=3600, user_metadata={"at": "2"}))
        if self.newer:
            self.wait("overwrite", trainer.save_state("first", overwrite=True))
            self.wait("external", trainer.save_weights_external("export"))
        self.wait("for a sampler", trainer.save_weights_for_sampler("served", 7200))
        wanted = self.loss(trainer, data)
        # Models from the checkpoint give the same loss. After one more step, the model that was restored with
        # the optimizer's state still gives the same loss as the first one, and the other model does not.
        again = self.ready(client.create_training_client_from_state_with_optimizer(state.path))
        fresh = self.ready(
            client.create_training_client_from_state(state.path, user_metadata={"from": "first"})
        )
        assert self.loss(again, data) == self.loss(fresh, data) == wanted
        after = []
        for one in (trainer, again, fresh):
            one.forward_backward(data, "cross_entropy").result(timeout=WAIT_S)
            one.optim_step(self.types.AdamParams(learning_rate=0.01)).result(timeout=WAIT_S)
            after.append(self.loss(one, data))
        self.note("after a step", after)
        assert after[0] == after[1] != after[2]
        self.wait("load", trainer.load_state(state.path))
        self.wait("load all", trainer.load_state_with_optimizer(state.path))
        assert self.loss(trainer, data) == wanted

    def sampling(self, client: Any, trainer: Any) -> None:
        types = self.types
        prompt = types.ModelInput.from_ints([5, 6, 7, 8])
        greedy = types.SamplingParams(max_tokens=6, temperature=0.0, seed=1)
        path = f"tinker://{trainer.model_id}/sampler_weights/served"
        base = self.ready(client.create_sampling_client(base_model=BASE))
        served = self.ready(client.create_sampling_client(model_path=path))
        unsaved = self.ready(trainer.save_weights_and_get_sampling_client())
        made = {"served": served, "from trainer": self.ready(trainer.create_sampling_client(path))}
        found = [
            list(self.wait(name, each.sample(prompt, 1, greedy)).sequences[0].tokens)
            for name, each in {**made, "unsaved": unsaved, "base": base}.items()
        ]
        assert found[0] == found[1] == found[2] != found[3]
        self.note("base models", [each.get_base_model() for each in (base, served, unsaved)])
        seeded = types.SamplingParams(max_tokens=12, seed=7, temperature=0.9, top_k=40, top_p=0.95)
        one, two = (self.wait(f"seed {n}", base.sample(prompt, 2, seeded)).sequences for n in range(2))
        assert [list(each.tokens) for each in one] == [list(each.tokens) for each in two]
        for name, stop in {"token": [found[3][2]], "text": "e", "texts": ["zq", "e"]}.items():
            params = types.SamplingParams(max_tokens=40, seed=1, stop=stop)
            self.wait(f"stop {name}", base.sample(prompt, 1, params))
        scores = self.wait("scores", base.compute_logprobs(prompt))
        asked = base.sample(prompt, 1, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=3)
        told = self.wait("prompt", asked)
        assert np.allclose(told.prompt_logprobs[1:], scores[1:], atol=1e-5)
        if self.newer:
            assert self.wait("last", base.compute_logprobs(prompt, 2))[:2] == [None, None]
            targets = types.TensorData(data=[12, 1, 13, -1, 14, 3], dtype="int64", shape=[3, 2])
            self.wait("all of it", base.sample(prompt, 2, seeded, True, 2, 2, targets, 2, 2))
            os.environ["TINKER_API_KEY"] = self.key
            by_handle = self.tinker.SamplingClient.from_sampler_handle(served.get_sampler_handle())
            for name, copy in {"handle": by_handle, "pickle": pickle.loads(pickle.dumps(served))}.items():
                sampled = self.wait(name, copy.sample(prompt, 1, greedy))
                assert list(sampled.sequences[0].tokens) == found[0]
            del os.environ["TINKER_API_KEY"]
        # Training gives the sampled tokens the same log-probabilities as sampling did.
        drawn = served.sample(prompt, 1, types.SamplingParams(max_tokens=8, seed=4)).result(timeout=WAIT_S)
        trainer.load_state(f"tinker://{trainer.model_id}/weights/first").result(timeout=WAIT_S)
        whole = self.datum([5, 6, 7, 8, *drawn.sequences[0].tokens])
        scored = trainer.forward([whole], "cross_entropy").result(timeout=WAIT_S)
        given = scored.loss_fn_outputs[0]["logprobs"].to_numpy()[3:]
        assert np.allclose(given, drawn.sequences[0].logprobs, atol=1e-3)
        short = types.SamplingParams(max_tokens=4, seed=1)
        crowd = [served.sample(types.ModelInput.from_ints([n, n + 1]), 2, short) for n in range(1, 31)]
        self.note("crowd", [[list(s.tokens) for s in f.result(timeout=WAIT_S).sequences] for f in crowd])

    def refusals(self, client: Any, trainer: Any) -> None:
        types = self.types
        good = [self.datum([1, 2, 3])]
        self.refused("no such base", lambda: client.create_lora_training_client("no/such"))
        self.refused("no such loss", lambda: trainer.forward_backward(good, "wishful"))
        self.refused("strange token", lambda: trainer.forward([self.datum([1, 10**6])], "cross_entropy"))
        self.refused("negative rate", lambda: trainer.optim_step(types.AdamParams(learning_rate=-1.0)))
        self.refused("taken name", lambda: trainer.save_state("first"))
        self.refused("short life", lambda: trainer.save_state("brief", ttl_seconds=10))
        self.refused("no such weights", lambda: trainer.load_state("tinker://no/weights/where"))
        with self.service(api_key="tml-wrong") as wrong:
            self.refused("wrong key", wrong.get_server_capabilities)
        if self.newer:
            self.refused("other optimizer", lambda: trainer.optim_step(types.DimuonParams(learning_rate=0.1)))
            picture = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
            pictures = types.Datum(
                model_input=types.ModelInput(chunks=[picture]), loss_fn_inputs={"target_tokens": [1]}
            )
            self.refused("picture", lambda: trainer.forward([pictures], "cross_entropy"))
            secret = partial(trainer.save_weights_external, "e", age_encryption_recipients=["age1x"])
            self.refused("encryption", secret)
        # After these refusals the model still works.
        trainer.forward_backward(good, "cross_entropy").result(timeout=WAIT_S)

    def custom(self, client: Any, trainer: Any) -> None:
        """Train with custom losses, one that this process computes and one that is traced."""
        tokenizer = trainer.get_tokenizer()
        ids = self.note("tokens", list(tokenizer.encode("The cat sat. 12+30=42")))
        assert tokenizer.decode(ids) == "The cat sat. 12+30=42"
        if not importlib.util.find_spec("torch"):
            return

        def squares(data: Any, logprobs: Any) -> Any:
            total = sum((each**2).sum() for each in logprobs)
            return total, {"mine": float(total.detach())}

        def traced(logprobs: Any, weights: Any) -> Any:
            total = -(logprobs * weights).sum()
            return total, {"custom/nll:sum": total}

        data = [self.datum([5, 6, 7, 8])]
        result = self.wait("custom", trainer.forward_backward_custom(data, squares))
        assert abs(result.metrics["mine"] - result.metrics["loss:sum"]) < 1e-4
        handle = client.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result(timeout=WAIT_S)
        found = self.wait("traced", trainer.forward_backward_custom(data, handle))
        assert abs(found.metrics["loss:sum"] - self.loss(trainer, data)) < 1e-3

    def rest(self, client: Any, trainer: Any) -> None:
        rest = self.tinker.RestClient(base_url=self.url, api_key=self.key)
        run, path = trainer.model_id, f"tinker://{trainer.model_id}"
        session = run.partition(":")[0]
        self.wait("run", rest.get_training_run(run))
        self.wait("run by path", rest.get_training_run_by_tinker_path(f"{path}/weights/first"))
        self.wait("runs", rest.list_training_runs(limit=2, offset=1))
        mine = self.wait("runs of a project", rest.list_training_runs(project_id="p-1"))
        assert run in [each.training_run_id for each in mine.training_runs]
        self.wait("weights info", rest.get_weights_info_by_tinker_path(f"{path}/weights/first"))
        self.wait("sampler", rest.get_sampler(f"{session}:sample:0"))
        listed = self.wait("checkpoints", rest.list_checkpoints(run)).checkpoints
        assert {each.checkpoint_id for each in listed} >= {"weights/first", "sampler_weights/served"}
        self.wait("all checkpoints", rest.list_user_checkpoints(limit=2, offset=1))
        second = f"{path}/weights/second"
        self.wait("publish", rest.publish_checkpoint_from_tinker_path(second))
        self.wait("unpublish", rest.unpublish_checkpoint_from_tinker_path(second))
        if self.own:  # the reference client repeats a request after a 409 for five minutes
            self.refused("private twice", lambda: rest.unpublish_checkpoint_from_tinker_path(second))
        self.wait("ttl", rest.set_checkpoint_ttl_from_tinker_path(second, 4000))
        self.wait("no ttl", rest.set_checkpoint_ttl_from_tinker_path(second, None))
        self.wait("delete", rest.delete_checkpoint_from_tinker_path(second))
        self.refused("deleted", lambda: rest.delete_checkpoint_from_tinker_path(second))
        external = rest.get_external_weights_urls(f"{path}/external_weights/export").result(timeout=WAIT_S)
        self.note("files", sorted(external.urls))
        assert json.loads(_fetch(external.urls["adapter_config.json"]))["r"] == 4
        copied = self.wait("copy", rest.copy_weights(f"{path}/weights/first", "p-2", ttl_seconds=7200))
        restored = self.ready(client.create_training_client_from_state(copied))
        self.wait("of the copy", restored.forward([self.datum([5, 6, 7])], "cross_entropy"))
        found = self.wait("session", rest.get_session(session))
        assert run in found.training_run_ids
        assert session in self.wait("sessions", rest.list_sessions(limit=10)).sessions
        request = self.types.SessionSearchRequest(
            display_name="acceptance", user_metadata={"run": "1"}, limit=5
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hits = self.wait("search", rest.search_sessions(request))
        assert session in [each.session_id for each in hits.sessions]
        self.wait("project", rest.assign_session_project(session, "p-3"))
        trace = json.loads(_fetch(rest.export_session_trace(session).result(timeout=WAIT_S)))
        assert {"ForwardBackward", "OptimStep", "Sample"} <= {each["name"] for each in trace["traceEvents"]}
        if self.exchange:
            self.wait("whoami", rest.whoami())
        self.refused("no run", lambda: rest.get_training_run("nobody"))
        self.end(rest)

    def admin(self) -> None:
        admin = self.tinker.AdminClient(base_url=self.url, api_key=self.key)
        now = dt.datetime.now(dt.timezone.utc)
        start = now.replace(minute=0, second=0, microsecond=0)
        usage = admin.get_billing_usage(start - HOUR, start + HOUR).result(timeout=WAIT_S)
        counts: dict[str, int] = {}
        for event in usage.data:
            info = event.event_info
            name = f"{info.type} {getattr(info, 'cached', '')}".strip()
            counts[name] = counts.get(name, 0) + getattr(info, "token_count", getattr(info, "count", 0))
        self.note("usage", counts)
        assert min(counts["training"], counts["sampling_sample"]) > 200, counts
        self.wait("storage", admin.get_current_checkpoint_storage_usage())
        events = [each.event for each in admin.get_audit_log().result(timeout=WAIT_S).entries]
        assert {"checkpoint_created", "checkpoint_read", "checkpoint_deleted"} <= set(events)
        self.wait("projects", admin.get_audit_log("projects"))
        self.refused("long window", lambda: admin.get_billing_usage(start - 400 * HOUR, start))
        self.end(admin)

    def end(self, client: Any) -> None:
        if self.own:  # the other client would live until the process ends
            client.holder.close().result(timeout=WAIT_S)


def _fetch(url: str) -> bytes:
    """Return the content of a file, requested without a key."""
    with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
        content: bytes = reply.read()
        return content


def without_chance(tree: Any) -> Any:
    """Return a result with constants for the parts that differ from run to run: moments, ids of requests."""
    if isinstance(tree, dict):
        return {
            name: "some time" if name in _MOMENTS and each else without_chance(each)
            for name, each in tree.items()
        }
    if isinstance(tree, list):
        return [without_chance(each) for each in tree]
    return _COPY.sub(":copy:", _ID.sub("req-", tree)) if isinstance(tree, str) else tree


def computed(run: Run) -> None:
    """Make every call, with the options of `Computed` in the environment variable `COMPUTED`."""
    options = json.loads(os.environ["COMPUTED"])
    run.results = Computed(run.tinker.__name__, run.url, **options).run()


# ------------------------------------------------------------------------------------ running them

SCRIPTS = {
    each.__name__: each
    for each in (
        service, environment, training, losses, refusals, from_state, sampling, twins, foreign_handle,
        a_handle, tokenizer, computed,
    )
}  # fmt: skip


def step(run: Run, name: str) -> None:
    run.step = name
    run.mark(f"step/{name.replace(' ', '_')}")


def main() -> None:
    package, url, *scripts = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    run = Run(package, url)
    for name in scripts:
        SCRIPTS[name](run)
        if name != "computed":
            step(run, "over")
    if run.results:
        say(json.dumps(run.results, sort_keys=True))
    # Exit without waiting for the threads of the reference client. No request is under way.
    os._exit(0)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # to the process that started this one


if __name__ == "__main__":
    main()
