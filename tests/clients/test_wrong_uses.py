"""Wrong uses of the API raise an error at the call, before anything is sent, with the place and a remedy.

The table has the code of typical mistakes, each with a pattern that its error must match.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import tinker_sync
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.testing import LocalServer
from tinker_sync.types import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)

WRONG_USES: Mapping[str, str] = {
    # -------------------------------------------------------------------------------- the service client
    'ServiceClient("local")': r"user_metadata.*ServiceClient\(base_url='local'\)",
    'ServiceClient("https://example.org")': r"user_metadata.*base_url='https://example.org'",
    'ServiceClient(base_url="locall")': r"did you mean 'local'",
    'ServiceClient(base_url="localhost:8000", api_key="tml-k")': r"'http://localhost:8000'",
    'ServiceClient(base_ulr="local")': r"no parameter 'base_ulr'; did you mean 'base_url'",
    'ServiceClient(base_url="local", apikey="tml-k")': r"no parameter 'apikey'; did you mean 'api_key'",
    "ServiceClient()": r"TINKER_API_KEY.*base_url='local'",
    'ServiceClient(base_url="local", api_key=17)': r"api_key.*(text|str).*int",
    "ServiceClient(base_url=17)": r"base_url: expected text, got int",
    'ServiceClient(base_url="local", timeout="30s")': r"timeout.*(number|seconds).*'30s'",
    'ServiceClient(base_url="local", timeout=-1)': r"timeout.*-1",
    'ServiceClient(base_url="local", max_retries=-1)': r"max_retries.*-1",
    'ServiceClient(base_url="local", deadline=0)': r"deadline.*None for .*by kind of call.*got 0",
    'ServiceClient(base_url="local", dialect="grpc")': r"dialect.*auto.*'grpc'",
    'ServiceClient(base_url="local", default_headers={"X-Team": 7})': r"default_headers\['X-Team'\] is int",
    'ServiceClient(base_url="local", default_headers={"X-Team": "é"})': r"X-Team'\] cannot .* outside ASCII",
    'ServiceClient(base_url="local", on_queue_state="print")': r"on_queue_state: expected a function.*print",
    'ServiceClient(base_url="local", pace=0.1)': r"no argument 'pace' any more.*TINKER_PACE.*LocalServer",
    # Arguments of earlier versions name what to use in their place.
    'ServiceClient(base_url="local", telemetry=False)': r"no argument 'telemetry' any more: leave it out",
    'ServiceClient(base_url="local", keeper=True)': r"no argument 'keeper' any more.*recover.*checkpoints",
    'training.save_state("a", verify=True)': r"'verify' any more: call tinker_sync\.loop\.verify_checkpoint",
    'service.create_training_client_from_state_with_optimizer("tinker://r/weights/a", verify=0.1)': (
        r"'verify' any more: call tinker_sync\.loop\.verify_checkpoint"
    ),
    'type(training)(service.holder, model_id="m", recorded=())': r"'recorded' any more: leave it out",
    'training.save_state("a", ttl=3600)': r"save_state\(\) got an unexpected keyword argument 'ttl'",
    # -------------------------------------------------------------------------------- making clients
    'service.create_sampling_client("tinker-sync/random")': r"base_model='tinker-sync/random'",
    "service.create_sampling_client()": r"give model_path or base_model",
    'service.create_sampling_client("tinker://run/weights/a")': r"save_weights_for_sampler",
    'service.create_lora_training_client("")': r"base_model.*get_server_capabilities",
    'service.create_lora_training_client("tinker://run/weights/a")': r"create_training_client_from_state",
    'service.create_lora_training_client("m", lora_rank=8)': (
        r"^ServiceClient\.create_lora_training_client\(\).*'lora_rank'"
    ),
    'service.create_lora_training_client("tinker-sync/random", rank=-1)': r"rank.*1 or more.*-1",
    'service.create_lora_training_client("m", train_mlp=False, train_attn=False, train_unembed=False)': (
        r"at least one of train_mlp, train_attn, train_unembed"
    ),
    'service.create_training_client_from_state("tinker://run/sampler_weights/a")': r"save_state",
    'service.create_training_client_from_state("step-3")': r"'step-3'.*tinker://",
    'service.create_lora_training_client("m", rank="many")': r"rank",
    'service.create_lora_training_client("m", user_metadata=7)': r"user_metadata",
    'service.create_lora_training_client("m", user_metadata={"a": {1, 2}})': r"user_metadata",
    'service.create_sampling_client("tinker://")': r"tinker://",
    'service.create_training_client_from_state("tinker://run-1")': r"tinker://run-1",
    'service.create_training_client_from_state_with_optimizer("tinker://run-1//a")': r"tinker://run-1//a",
    'service.create_training_client_from_state("")': r"path",
    "service.create_training_client_from_state(future)": (
        r"^create_training_client_from_state: path: .*APIFuture; .*save_state\(name\)\.result\(\)\.path"
    ),
    "service.create_training_client_from_state_with_optimizer(future)": r"optimizer: path.*result\(\)\.path",
    "service.create_training_client_from_state(saved)": r"path.*SaveWeightsResponse; give its \.path",
    "service.create_sampling_client(future)": r"path.*result\(\)\.path",
    "service.create_sampling_client(saved)": r"give its \.path",
    "service.create_rest_client().delete_checkpoint_from_tinker_path(saved)": r"give its \.path",
    "service.create_rest_client().download_checkpoint(future, 'a')": r"result\(\)\.path",
    'service.budget(usd="5")': r"budget: usd must be a number, 0 or more, got '5'",
    "service.budget(tokens=[5])": r"budget: tokens must be a number, 0 or more, got \[5\]",
    'service.create_lora_training_client("m", deadline="60")': r"deadline.*number of seconds.*'60'",
    'service.create_lora_training_client("m", deadline=[60])': r"deadline.*number of seconds.*\[60\]",
    'service.get_tokenizer("/no/such/directory")': r"/no/such/directory does not exist",
    # -------------------------------------------------------------------------------- prompts
    'ModelInput.from_ints("2 + 3 =")': r"from_text",
    "ModelInput.from_ints([1, 2.5])": r"tokens\[1\].*2\.5",
    'ModelInput.from_ints([{"token": 1}])': r"tokens\[0\].*token id.*dict",
    "ModelInput.from_ints([[1, 2], [3, 4]])": r"tokens.*(dimension|nested|flat|list)",
    'ModelInput.from_ints({"input_ids": [1, 2]})': r"\['input_ids'\]",
    'ModelInput.from_ints(tokenizer("2 + 3 ="))': r"\['input_ids'\]",
    "ModelInput.from_ints([2**40])": r"tokens\[0\].*1099511627776",
    'ModelInput("2 + 3 =")': r"ModelInput\.from_ints\(token_ids\) or ModelInput\.from_text",
    "ModelInput([1, 2, 3])": r"ModelInput\.from_ints\(token_ids\)",
    'ModelInput.from_text("2 + 3 =", "tinker-sync/tiny")': r"tokenizer.*get_tokenizer\('tinker-sync/tiny'\)",
    'ModelInput.from_text(["2", "3"], tokenizer)': r"text: expected (one )?text.*list",
    'ModelInput.from_chat([{"from": "human", "value": "Hi"}], tokenizer)': (
        r"messages\[0\]: has no 'role'; rename 'from' to 'role', 'value' to 'content', and 'human' to 'user'"
    ),
    'ModelInput.from_chat([{"role": "user", "content": None}], tokenizer)': (
        r"messages\[0\]\['content'\]: is None; give text"
    ),
    'ModelInput.from_chat([{"role": "user"}], tokenizer)': r"messages\[0\]\['content'\]: is missing",
    'ModelInput.from_chat([{"role": "user", "content": 7}], tokenizer)': r"'content'.*expected text, got 7",
    'data.from_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], tokenizer)': (
        r"messages\[1\]\['content'\]: is None; give text"
    ),
    'tokenizer.encode(b"x")': r"text: expected a str, got bytes; give text\.decode\(\)",
    'ModelInput.from_chat("Hi", tokenizer)': r"expected a list of dictionaries with role",
    'data.from_chat([{"role": "user", "content": "Hi"}], tokenizer)': (
        r"no message of the assistant.*add the answer, or use ModelInput\.from_chat"
    ),
    # -------------------------------------------------------------------------------- sampling
    'sampling.sample("2 + 3 =", 1, params)': r"prompt.*ModelInput\.from_text",
    "sampling.sample([1, 2], 1, params)": r"prompt.*ModelInput\.from_ints",
    "sampling.sample(ModelInput.empty(), 1, params)": r"^prompt: is empty; give at least one token",
    'sampling.sample(ModelInput.from_text("", tokenizer), 1, params)': r"^prompt: is empty",
    "sampling.compute_logprobs(ModelInput.from_ints([]))": r"^prompt: is empty",
    "sampling.sample(prompt, params, 1)": r"num_samples.*SamplingParams",
    "sampling.sample(prompt, 1, params, deadline=float('nan'))": r"deadline.*number of seconds.*nan",
    "sampling.sample(prompt, 1, 64)": r"sampling_params.*SamplingParams",
    "sampling.sample(prompt, 0, params)": r"num_samples: expected 1 or more, got 0",
    "sampling.sample(ModelInput.from_ints([1, -5]), 1, params)": (
        r"prompt\.chunks\[0\]\.tokens\[1\]: expected 0 or more, got -5"
    ),
    "sampling.sample(prompt, 1, params, topk_prompt_logprobs=-1)": r"topk_prompt_logprobs: expected 0",
    "sampling.sample(prompt, 1, SamplingParams(max_tokens=0))": r"max_tokens: expected 1 or more, got 0",
    'sampling.compute_logprobs("2 + 3 =")': r"prompt.*ModelInput\.from_text",
    'sampling.map("2 + 3 =", params)': r"prompts is one str; give a list",
    "SamplingParams(max_token=3)": r"no parameter 'max_token'; did you mean 'max_tokens'",
    "SamplingParams(temperature=-1)": r"temperature: expected 0 or more, got -1",
    "SamplingParams(top_p=1.5)": r"top_p: expected more than 0 and at most 1, got 1\.5",
    "SamplingParams(stop=5)": r"stop: expected text, a list of texts or a list of token ids",
    "passed.loss": r"no attribute 'loss'.*result\.metrics\['loss:sum'\]",
    "passed.metrics['loss']": r"no metric 'loss'; there are loss:sum, loss:mean",
    "ForwardBackwardOutput('ArrayRecord', []).metrics['loss']": r"'loss'; the server sent none",
    "response.tokens": r"response\.sequences\[0\]\.tokens",
    "response.text": r"response\.sequences\[0\]\.text\(tokenizer\)",
    "response[0]": r"response\.sequences\[0\]",
    # -------------------------------------------------------------------------------- futures
    'future["metrics"]': r"call \.result\(\) first",
    "future.sequences": r"no attribute 'sequences'; call \.result\(\) first",
    "list(future)": r"call \.result\(\) first",
    "tinker_sync.gather(future)": r"gather\(\[future\]\)",
    # -------------------------------------------------------------------------------- training
    'training.forward_backward(datum, "cross_entropy")': r"data: .*list.*\[datum\]",
    'training.forward(datum, "cross_entropy")': r"got a single one; write \[datum\]$",
    "training.forward_backward_custom(datum, print)": r"got a single one; write \[datum\]$",
    "training.forward_backward_custom(None, print)": r"^data: expected a list of Datum, got NoneType$",
    'training.forward(None, "cross_entropy")': r"^data: expected a list of Datum, got NoneType$",
    'training.forward([prompt], "cross_entropy")': r"^data\[0\]: expected a Datum, got ModelInput$",
    "training.forward_backward_custom([prompt], print)": r"^data\[0\]: expected a Datum, got ModelInput$",
    'training.forward_backward([], "cross_entropy")': r"data: is empty; give at least one Datum",
    'training.forward_backward([{"input": [1]}], "cross_entropy")': r"data\[0\].*Datum.*dict",
    'training.forward_backward([datum], "crossentropy")': r"loss_fn.*did you mean 'cross_entropy'\?",
    'training.forward([datum], "Cross-Entropy")': r"loss_fn.*did you mean 'cross_entropy'\?",
    'training.forward_backward([datum], "importance_samplng")': r"did you mean 'importance_sampling'\?",
    'training.forward_backward([datum], "PPO")': r"did you mean 'ppo'\?",
    'training.forward_backward([datum], "")': r"loss_fn: ''.*such as 'cross_entropy'",
    "training.forward_backward([datum], len)": r"loss_fn.*forward_backward_custom",
    'training.forward_backward_custom([datum], "cross_entropy")': r"loss_fn.*(function|forward_backward)",
    'training.forward_backward([Datum(prompt, {})], "cross_entropy")': (
        r"data\[0\]\.loss_fn_inputs\['target_tokens'\]: is missing; cross_entropy needs it"
    ),
    'training.forward_backward([Datum(prompt, {"targets": [2, 3]})], "cross_entropy")': (
        r"data\[0\]\.loss_fn_inputs\['target_tokens'\]: is missing.*'targets'"
    ),
    'training.forward_backward([datum], "importance_sampling")': (
        r"data\[0\]\.loss_fn_inputs\['logprobs'\]: is missing; importance_sampling needs it"
    ),
    'training.forward_backward([Datum(prompt, {"target_tokens": [2, -100]})], "cross_entropy")': (
        r"data\[0\]\.loss_fn_inputs\['target_tokens'\]\[1\]: expected 0 or more, got -100.*weights"
    ),
    'training.forward_backward([Datum(prompt, {"target_tokens": [2]})], "cross_entropy")': (
        r"data\[0\]\.loss_fn_inputs\['target_tokens'\]: has length 1, model_input has 2"
    ),
    'training.forward([Datum(prompt, {"target_tokens": [2, 3], "weights": [1, float("nan")]})], "ppo")': (
        r"data\[0\]\.loss_fn_inputs\['weights'\]\[1\]: expected a finite number, got nan"
    ),
    "Datum([1, 2], {})": r"model_input.*ModelInput\.from_ints",
    "training.optim_step(1e-4)": r"optim_step: expected AdamParams.*AdamParams\(learning_rate=0\.0001\)",
    "training.optim_step(np.float32(0.5))": r"write AdamParams\(learning_rate=0\.5\)",
    "tinker_sync.AdamParams(1e-4)": r"by name; write AdamParams\(learning_rate=\.\.\.\)",
    "tinker_sync.AdamParams(1e-4, 0.9)": r"AdamParams\(learning_rate=\.\.\., beta1=\.\.\.\)",
    "training.optim_step(tinker_sync.AdamParams(learning_rate=float('nan')))": (
        r"^optim_step: learning_rate: expected a finite number, got nan"
    ),
    "training.optim_step(tinker_sync.AdamParams(grad_clip_norm=float('inf')))": (
        r"^optim_step: grad_clip_norm: .*got inf; 0 turns clipping off"
    ),
    "training.optim_step()": r"optim_step: expected AdamParams",
    "training.optim_step(tinker_sync.AdamParams(learning_rate=-1e-4))": r"learning_rate.*0 or more.*-0\.0001",
    "tinker_sync.AdamParams(lr=1e-4)": r"no parameter 'lr'; did you mean 'learning_rate'",
    "training.optim_step(tinker_sync.AdamParams(beta1=1.5))": r"beta1.*1\.5",
    'training.save_state("")': r"name.*",
    'training.save_state("step 3/b")': r"step 3/b",
    'training.save_state("step-3", ttl_seconds=0)': r"ttl_seconds.*0",
    'training.save_weights_external("")': r"^save_weights_external: name",
    'training.save_weights_external("a/b")': r"^save_weights_external: name.*a/b",
    'training.save_weights_external("step-3", ttl_seconds=-5)': r"^save_weights_external: ttl_seconds.*-5",
    'training.save_weights_and_get_sampling_client(kind="live")': r"kind is 'snapshot' or 'inflight'",
    # -------------------------------------------------------------------------------- values and objects
    "setattr(params, 'max_tokens', 5)": r"model_copy\(update=\{'max_tokens': \.\.\.\}\)",
    "delattr(params, 'seed')": r"SamplingParams.*model_copy",
    "pickle.dumps(training)": r"TrainingClient.*(thread|save_state)",
    "pickle.dumps(service)": r"ServiceClient.*process",
    "copy.deepcopy(training)": r"TrainingClient",
    "tinker_sync.TensorData([1, 2])": r"dtype is required, 'int64' or 'float32'",
    'tinker_sync.TensorData([1], dtype="int32")': r"expected 'int64' or 'float32', got 'int32'",
    "closed.create_sampling_client(base_model='m')": r"closed; make a new",
    'service.create_rest_client().download_checkpoint("tinker://r/weights/a", "a\\0b")': r"to: .*'a\\x00b'",
    'service.create_rest_client().delete_checkpoint_from_tinker_path("run/a")': r"run/a.*tinker://",
}


MODEL = "tinker-sync/random"


class World(dict[str, Any]):
    """The names that the code of the table uses. A server starts when the code first uses a client."""

    def __init__(self) -> None:
        super().__init__(
            copy=copy, pickle=pickle, tinker_sync=tinker_sync, data=tinker_sync.data, np=np,
            ServiceClient=tinker_sync.ServiceClient, ModelInput=ModelInput, Datum=Datum,
            SamplingParams=SamplingParams, params=SamplingParams(max_tokens=2),
            prompt=ModelInput.from_ints([1, 2]), response=SampleResponse([SampledSequence("stop")]),
            ForwardBackwardOutput=ForwardBackwardOutput, saved=SaveWeightsResponse(path="tinker://run/weights/a"),
            passed=ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 6.0, "loss:mean": 1.5}),
        )  # fmt: skip
        self.server: LocalServer | None = None

    def __missing__(self, name: str) -> Any:
        self[name] = MAKERS[name](self)
        return self[name]

    def make_service(self) -> tinker_sync.ServiceClient:
        self.server = LocalServer(model=MODEL).start()
        return self.server.service()

    def make_closed(self) -> tinker_sync.ServiceClient:
        service: tinker_sync.ServiceClient = self["service"]
        service.close().result()
        return service

    @property
    def sent(self) -> list[str]:
        """The endpoints of the calls that the server got, without those that make and keep clients.

        Where the code needs no such client, those that make one count too.
        """
        calls = [] if self.server is None else self.server.calls
        quiet = ["heartbeat", "config", "capabilities", "retrieve", "unload", "finish", "healthz"]
        quiet += ["create"] if {"training", "sampling"} & self.keys() else []
        return [call.endpoint for call in calls if not any(word in call.endpoint for word in quiet)]


MAKERS: dict[str, Callable[[World], Any]] = {
    "datum": lambda world: Datum(world["prompt"], {"target_tokens": [2, 3]}),
    "future": lambda world: APIFuture(),
    "tokenizer": lambda world: tinker_sync.get_tokenizer("tinker-sync/tiny"),
    "service": World.make_service,
    "closed": World.make_closed,
    "training": lambda world: world["service"].create_lora_training_client(MODEL, rank=4).result(),
    "sampling": lambda world: world["service"].create_sampling_client(base_model=MODEL).result(),
}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    if made.server is not None:
        made.server.close()


@pytest.mark.parametrize("code", WRONG_USES)
def test_a_wrong_use_is_answered_at_the_call(world: World, code: str) -> None:
    expected = (tinker_sync.TinkerError, TypeError, ValueError, AttributeError, KeyError, AssertionError)
    with pytest.raises(expected) as caught:
        eval(code, {}, world)  # the code is in the table above
    assert re.search(WRONG_USES[code], str(caught.value), re.DOTALL), str(caught.value)
    assert world.sent == []
