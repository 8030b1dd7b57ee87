"""transformers gives the same results for the built-in model: weights, tokenizer, chats and forward pass."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from benchmarks.tiny_model import make
from benchmarks.tiny_model.scores import Model
from tinker_sync.local.tiny import directory

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

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
