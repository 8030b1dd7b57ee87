"""What the built-in model knows: far more than chance, of what it never read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tinker_sync.local.engine.model import random_weights
from tinker_sync.local.engine.sample_spec import SampleSpec
from tinker_sync.local.engine.sampler import Sampler
from tinker_sync.local.tiny import scores, tasks
from tinker_sync.local.tiny.scores import Model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.mark.parametrize("kind", tasks.KINDS)
@pytest.mark.parametrize("chat", [False, True])
def test_problems_it_never_met(model: Model, kind: str, chat: bool) -> None:
    name, share, chance = scores.exact(model, kind, 30, chat=chat)
    assert name.startswith(kind)
    assert share > 0.9
    assert chance < 0.2


def test_stories_it_never_read(model: Model) -> None:
    _, perplexity, chance = scores.perplexity(model, 20)
    assert perplexity < 2
    assert chance > 50


def test_facts(model: Model) -> None:
    assert scores.facts(model).value > 0.9


def test_it_tells_stories_that_end(model: Model) -> None:
    prompt = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    specs = [SampleSpec(prompt=np.array(model.encode(prompt)), seed=0, num_samples=20, max_tokens=150)]
    with scores._one_thread():
        samples = Sampler(model.weights).run(specs)[0].samples
    texts = [model.tokenizer.decode(one.tokens.tolist(), skip_special_tokens=False) for one in samples]
    ended = [text.partition("<|im_end|>")[0] for text in texts if "<|im_end|>" in text]
    assert len(ended) > 15
    assert sum(story.endswith(".") for story in ended) > 15
    assert len(set(ended)) > 15


def test_scores_tell_a_model_that_knows_nothing(model: Model) -> None:
    ignorant = Model()
    ignorant.weights = random_weights(model.weights.config, seed=1)
    assert scores.exact(ignorant, "addition", 10).value < 0.2
    assert scores.perplexity(ignorant, 5).value > 300


def test_answers_are_what_follows_up_to_the_stop(model: Model) -> None:
    assert model.answers(["Q: 23+45=", "reverse: 4719 ->"]) == ["68", " 9174"]
    assert np.mean([lp.mean() for lp in model.logprobs(["Q: 23+45=68\n"])]) > -3


def test_the_command_prints_a_table() -> None:
    code = (
        "import sys; from tinker_sync.local.tiny import __main__ as m, scores;"
        "m.measure = lambda model: [scores.perplexity(model, 2)];"
        "sys.exit(m.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "853,376 parameters"
    assert lines[1].split()[:3] == ["perplexity", "of", "stories"]
