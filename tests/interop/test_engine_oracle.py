"""The engine and the built-in model give the same numbers as transformers, torch autograd and AdamW.

Needs torch and transformers, nothing else; random weights are written by transformers itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_models import LOSS_CONFIGS

from benchmarks.tiny_model import make
from benchmarks.tiny_model.scores import Model
from tinker_sync.local.engine import decoder
from tinker_sync.local.engine.decoder import PackedSpan, Tape, packed_states
from tinker_sync.local.engine.lora import AdapterRoute, LoraParams, LoraSettings
from tinker_sync.local.engine.losses import Example
from tinker_sync.local.engine.model import Weights, load_weights
from tinker_sync.local.engine.sampling import Sampler, SampleSpec
from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.tiny import directory
from tinker_sync.types import AdamParams

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB = 211
Pair = tuple[Any, Weights]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        {"rope_theta": 500.0, "rope_scaling": SCALING, "rope_parameters": SCALING | {"rope_theta": 500.0}},
    ),
    "llama-plain": ("Llama", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Weights]]:
    """Yield a model of transformers, and the weights that the engine reads from its files."""
    name, extra = KINDS[request.param]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**(SIZES | extra))
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "norm" in key:
                tensor.mul_(1 + 0.3 * torch.randn(tensor.shape))
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    yield model, load_weights(folder)
    torch.set_num_threads(threads)


def our_logits(weights: Weights, params: LoraParams | None, tokens: Any) -> Any:
    tape = Tape([PackedSpan(0, 1, len(tokens))], recording=False)
    hidden = packed_states(weights, tokens, np.arange(len(tokens)), params, tape)
    return decoder.logits(weights, hidden, [AdapterRoute(params)])


def test_logits(pair: Pair) -> None:
    model, weights = pair
    tokens = np.random.default_rng(0).integers(0, VOCAB, 300)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)[None]).logits[0].numpy()
    assert np.abs(theirs).max() > 1
    assert np.abs(our_logits(weights, None, tokens) - theirs).max() < 1e-4


def test_200_greedy_tokens(pair: Pair) -> None:
    model, weights = pair
    prompts = [np.random.default_rng(seed).integers(0, VOCAB, 5 + 11 * seed) for seed in range(3)]
    specs = [SampleSpec(prompt=prompt, seed=0, max_tokens=200, temperature=0) for prompt in prompts]
    seen: set[int] = set()
    for prompt, result in zip(prompts, Sampler(weights).run(specs), strict=True):
        ids = torch.tensor(prompt)[None]
        with torch.no_grad():
            theirs = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False, pad_token_id=0
            )
        assert result.samples[0].tokens.tolist() == theirs[0, len(prompt) :].tolist()
        assert len(result.samples[0].tokens) == 200
        seen |= set(result.samples[0].tokens.tolist())
    assert len(seen) > 20  # the text does not repeat a few tokens


# ------------------------------------------------------------------------------------------------ training


class Adapted(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A linear layer of transformers whose output has that of a LoRA adapter added."""

    def __init__(self, base: Any, a: Any, b: Any, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = torch.nn.Parameter(torch.tensor(a)), torch.nn.Parameter(torch.tensor(b))

    def forward(self, x: Any) -> Any:
        return self.base(x) + (x @ self.a.T) @ self.b.T * self.scale


class TheirRun:
    """A model of transformers with a LoRA adapter, a copy of the engine's adapter.

    The end of the `with` block removes the adapter from the model.
    """

    def __init__(self, model: Any, params: LoraParams) -> None:
        self.model = model
        self._undo = []
        self.adapters: dict[str, Adapted] = {}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        named = params.named()
        for name in [key.removesuffix(".lora_A") for key in named if key.endswith(".lora_A")]:
            parent_name, _, last = name.rpartition(".")
            parent = model.get_submodule(parent_name)
            base = getattr(parent, last)
            a, b = (named[f"{name}.lora_{letter}"].copy() for letter in "AB")
            self.adapters[name] = Adapted(base, a, b, params.settings.scale)
            setattr(parent, last, self.adapters[name])
            self._undo.append((parent, last, base))

    def __enter__(self) -> TheirRun:
        return self

    def __exit__(self, *_: object) -> None:
        for parent, last, base in self._undo:
            setattr(parent, last, base)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the adapter, by the names that the engine has for them."""
        return {
            f"{name}.lora_{letter}": getattr(one, letter.lower())
            for name, one in self.adapters.items()
            for letter in "AB"
        }

    def loss(self, data: list[Example], loss_fn: str, config: dict[str, float]) -> tuple[Any, list[Any]]:
        """Compute a loss by its documented formula, with torch. Return the loss and the log-probabilities."""
        total, shown = torch.zeros(()), []
        for one in data:
            inputs = {name: torch.tensor(value) for name, value in one.inputs.items()}
            logprobs = self.model(torch.tensor(one.tokens)[None]).logits[0].log_softmax(-1)
            targets = inputs["target_tokens"]
            p = logprobs.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
            total = total + their_loss(p, inputs, loss_fn, config)
            shown.append(p.detach().numpy())
        return total, shown


def their_loss(p: Any, inputs: dict[str, Any], loss_fn: str, config: dict[str, float]) -> Any:
    if loss_fn == "cross_entropy":
        return -(p * inputs["weights"]).sum()
    q, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(p - q)
    low = config.get("clip_low_threshold", {"ppo": 0.8}.get(loss_fn, 0.0))
    high = config.get("clip_high_threshold", {"ppo": 1.2}.get(loss_fn, 4.0))
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn in ("cispo", "stable_reinforce"):
        return -(ratio.clamp(low, high).detach() * p * advantages).sum()
    if loss_fn == "dro":
        return -(p * advantages - config.get("beta", 0.05) / 2 * (p - q) ** 2).sum()
    if loss_fn == "gspo":
        mask = inputs["sequence_ratio_mask"] != 0
        ratio = torch.exp((p - q)[mask].mean()).detach() * torch.exp(p - p.detach())
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def our_run(weights: Weights) -> AdapterTrainer:
    run = AdapterTrainer(weights, LoraSettings(rank=4, seed=1))
    run.params.flat[:] = np.random.default_rng(2).standard_normal(len(run.params.flat)) * 0.05
    return run


def data_for(run: AdapterTrainer, loss_fn: str) -> list[Example]:
    """Return data for a loss. Their ratios are close to 1, and some are beyond the clipping thresholds."""
    rng = np.random.default_rng(7)
    data = []
    for length in (33, 7, 64, 33):
        tokens = rng.integers(0, VOCAB, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if loss_fn == "cross_entropy":
            inputs["weights"] = rng.random(length, dtype=np.float32)
        else:
            now = run.forward(
                [Example(tokens[:-1], {"target_tokens": tokens[1:]})], "cross_entropy"
            ).logprobs[0]
            inputs["logprobs"] = now + 0.4 * rng.standard_normal(length, dtype=np.float32)
            inputs["advantages"] = rng.standard_normal(length, dtype=np.float32)
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = (np.arange(length) > 3).astype(np.float32)
        data.append(Example(tokens[:-1], inputs))
    return data


def relative(ours: Any, theirs: Any) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("loss_fn", sorted(LOSS_CONFIGS))
def test_gradients_of_every_loss(pair: Pair, loss_fn: str) -> None:
    model, weights = pair
    run = our_run(weights)
    data, config = data_for(run, loss_fn), LOSS_CONFIGS[loss_fn]
    ours = run.forward_backward(data, loss_fn, config)
    with TheirRun(model, run.params) as theirs:
        loss, shown = theirs.loss(data, loss_fn, config)
        loss.backward()
        assert ours.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-4)
        for one, two in zip(ours.logprobs, shown, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-4)
        gradients = run.grads.named()
        for name, parameter in theirs.parameters().items():
            assert relative(gradients[name], parameter.grad.numpy()) < 1e-4, name


def test_gradients_with_several_candidates(pair: Pair) -> None:
    model, weights = pair
    run, rng = our_run(weights), np.random.default_rng(8)
    tokens, targets = rng.integers(0, VOCAB, 20), rng.integers(0, VOCAB, (20, 5))
    weighted = rng.random((20, 5), dtype=np.float32)
    data = [Example(tokens, {"target_tokens": targets, "weights": weighted})]
    run.forward_backward(data, "cross_entropy")
    with TheirRun(model, run.params) as theirs:
        theirs.loss(data, "cross_entropy", {})[0].backward()
        gradients = run.grads.named()
        for name, parameter in theirs.parameters().items():
            assert relative(gradients[name], parameter.grad.numpy()) < 1e-4, name


@pytest.mark.parametrize("eps", [1e-8, 1e-12])
@pytest.mark.parametrize("clip", [0.0, 0.5], ids=["free", "clipped"])
def test_ten_steps(pair: Pair, clip: float, eps: float) -> None:
    model, weights = pair
    run = our_run(weights)
    settings = AdamParams(learning_rate=1e-3, weight_decay=0.1, eps=eps, grad_clip_norm=clip)
    with TheirRun(model, run.params) as theirs:
        parameters = theirs.parameters()
        optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        data = data_for(run, "cross_entropy")
        for step in range(10):
            part = data[step % 3 : step % 3 + 2]
            run.forward_backward(part, "cross_entropy")
            norm = run.optim_step(settings)
            optimizer.zero_grad()
            theirs.loss(part, "cross_entropy", {})[0].backward()
            if clip:
                reported = torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
                assert norm == pytest.approx(float(reported), rel=1e-4)
            optimizer.step()
        ours = run.params.named()
        for name, parameter in parameters.items():
            assert np.abs(ours[name] - parameter.detach().numpy()).max() < 1e-4, name


# ------------------------------------------------------------------------------------ the built-in model
TEXTS = [
    "Q: 23+45=68\nQ: 71-38=33\n",
    "reverse: 4719 -> 9174\ncopy: k d m p -> k d m p\n",
    "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\nTom lost a red ball at the park. "
    * 4,
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(str(directory()), dtype=torch.float32).eval()


@pytest.mark.parametrize("text", TEXTS)
def test_log_probabilities_are_those_of_transformers_and_of_the_script(theirs: Any, text: str) -> None:
    model = Model()
    ids = model.encode(text)
    tokens = torch.tensor([ids])
    weights = {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    with torch.no_grad():
        logits = {"transformers": theirs(tokens).logits, "script": make.forward(torch, weights, tokens)}
    [ours] = model.logprobs([text])
    for name, found in logits.items():
        every = torch.log_softmax(found[0, :-1], dim=-1).numpy()
        np.testing.assert_allclose(ours, every[np.arange(len(ours)), ids[1:]], atol=1e-4, err_msg=name)


def test_the_tokenizer_is_read_by_transformers() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory()))
    model = Model()
    for text in [*TEXTS, "Grüße, 日本, \U0001f600\ttabs\r\n"]:
        assert tokenizer(text)["input_ids"] == model.encode(text)
        assert tokenizer.decode(model.encode(text)) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    chat = [
        {"role": "system", "content": "Answer in few words."},
        {"role": "user", "content": "What is 23+45?"},
    ]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nAnswer in few words.<|im_end|>\n"
        "<|im_start|>user\nWhat is 23+45?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.answers([text], "<|im_end|>") == ["23+45=68"]
