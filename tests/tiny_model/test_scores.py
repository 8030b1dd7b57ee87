"""The built-in model solves held-out problems far better than chance."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tiny_model import scores, tasks
from benchmarks.tiny_model.scores import Model
from tinker_sync.local.engine.model import random_weights
from tinker_sync.local.engine.sampling import Sampler, SampleSpec


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.mark.parametrize("kind", tasks.KINDS)
@pytest.mark.parametrize("chat", [False, True])
def test_held_out_problems_are_solved(model: Model, kind: str, chat: bool) -> None:
    name, share, chance = scores.exact(model, kind, 30, chat=chat)
    assert name.startswith(kind)
    assert share > 0.9
    assert chance < 0.2


def test_held_out_stories_are_predicted(model: Model) -> None:
    _, perplexity, chance = scores.perplexity(model, 20)
    assert perplexity < 2
    assert chance > 50


def test_facts_are_known(model: Model) -> None:
    assert scores.facts(model).value > 0.9


def test_stories_end(model: Model) -> None:
    prompt = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    specs = [SampleSpec(prompt=np.array(model.encode(prompt)), seed=0, num_samples=20, max_tokens=150)]
    with scores._one_thread():
        samples = Sampler(model.weights).run(specs)[0].samples
    texts = [model.tokenizer.decode(one.tokens.tolist(), skip_special_tokens=False) for one in samples]
    ended = [text.partition("<|im_end|>")[0] for text in texts if "<|im_end|>" in text]
    assert len(ended) > 15
    assert sum(story.endswith(".") for story in ended) > 15
    assert len(set(ended)) > 15


def test_random_weights_score_low(model: Model) -> None:
    untrained = Model()
    untrained.weights = random_weights(model.weights.config, seed=1)
    assert scores.exact(untrained, "addition", 10).value < 0.2
    assert scores.perplexity(untrained, 5).value > 300


def test_answers_end_at_the_stop_text(model: Model) -> None:
    assert model.answers(["Q: 23+45=", "reverse: 4719 ->"]) == ["68", " 9174"]
    assert np.mean([lp.mean() for lp in model.logprobs(["Q: 23+45=68\n"])]) > -3


def test_the_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scores, "measure", lambda model: [scores.perplexity(model, 2)])
    assert scores.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "853,376 parameters"
    assert lines[1].split()[:3] == ["perplexity", "of", "stories"]
