"""The built-in model solves held-out problems, which its training documents do not contain."""

from __future__ import annotations

import functools
import itertools
import random
import re

import numpy as np
import pytest

from benchmarks.tiny_model import scores, tasks
from benchmarks.tiny_model.corpus import documents, draw_story
from benchmarks.tiny_model.page import END_OF_TURN, TURN, Page, is_held_out
from benchmarks.tiny_model.scores import Model
from tinker_sync.local.engine.sampling import Sampler, SampleSpec


@functools.cache
def pages() -> list[Page]:
    return list(itertools.islice(documents(seed=3), 4000))


@functools.cache
def text() -> str:
    return "\n".join(page.text for page in pages())


def test_every_sum_is_right_and_below_a_hundred() -> None:
    sums = re.findall(r"(\d+)([+-])(\d+)=(\d+)", text())
    assert len(sums) > 2000
    for one, sign, two, result in sums:
        assert max(int(one), int(two)) < 100
        assert int(result) == int(one) + (int(two) if sign == "+" else -int(two))


def test_every_copy_and_reversal_is_right() -> None:
    lines = re.findall(r"^(copy|reverse): (.+) -> (.+)$", text(), flags=re.MULTILINE)
    assert len(lines) > 1000
    for kind, given, result in lines:
        items, got = (text.split(" ") if " " in text else list(text) for text in (given, result))
        assert got == (items if kind == "copy" else items[::-1])


def test_held_out_problems_are_not_in_the_corpus() -> None:
    read = {f"Q: {problem}=" for problem in re.findall(r"(\d+[+-]\d+)=", text())}
    read |= set(re.findall(r"^((?:copy|reverse): .+ ->)", text(), flags=re.MULTILINE))
    asked = re.findall(r"^(Copy|Reverse): (.+)<\|im_end\|>$", text(), flags=re.MULTILINE)
    assert len(asked) > 50
    read |= {f"{kind.lower()}: {items} ->" for kind, items in asked}
    assert len(read) > 2000
    assert not [prompt for prompt in read if is_held_out(prompt)]
    rng = random.Random(1)
    later = {tasks.draw(kind, rng, held_out=True).prompt for kind in tasks.KINDS for _ in range(300)}
    assert all(is_held_out(prompt) for prompt in later)
    assert not later & read


def test_held_out_stories_are_not_in_the_corpus() -> None:
    stories = {draw_story(random.Random(seed), held_out=True).text for seed in range(200)}
    assert len(stories) > 150
    assert not [story for story in stories if story in text()]


def test_a_story_contains_the_answers_to_its_questions() -> None:
    asked = 0
    for seed in range(500):
        story = draw_story(random.Random(seed), held_out=False)
        for question, answer in story.questions:
            asked += 1
            core = answer.removeprefix("to ").removeprefix("a ")
            assert question.endswith("?")
            assert core in story.text, (story, question)
    assert asked > 500


def test_chats_are_complete() -> None:
    chats = [page.text for page in pages() if page.text.startswith(TURN)]
    assert len(chats) > 400
    turn = re.compile(rf"{re.escape(TURN)}(system|user|assistant)\n[^|]+?{re.escape(END_OF_TURN)}\n")
    for chat in chats:
        roles = turn.findall(chat)
        assert turn.sub("", chat) == ""
        assert roles[roles[0] == "system" :] == ["user", "assistant"] * (len(roles) // 2)


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
