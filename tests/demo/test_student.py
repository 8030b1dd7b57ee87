"""The requests of the student, recorded by a double of both clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinker_sync.demo.lessons import choose_animals, make_story_prompt
from tinker_sync.demo.student import ANIMALS_PER_STEP, EXAMPLES, STORIES_PER_ANIMAL, RewardedStory, Student
from tinker_sync.types import Datum, SampledSequence, SamplingParams


class Characters:
    """A tokenizer with one token for each character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, tokens))


class Pending:
    def __init__(self, value: Any, on_result: Callable[[], None] = lambda: None) -> None:
        self.value, self.on_result = value, on_result

    def result(self) -> Any:
        self.on_result()
        return self.value


class Server:
    """A double of the training and the sampling client, with a log of the requests and the reads of results.

    In a group of sampled stories, the first half is good, and mentions the animal.
    """

    def __init__(self, good: str = "The {animal} sang.", bad: str = "The cup sang.") -> None:
        self.good, self.bad = good, bad
        self.log: list[str] = []
        self.passes: list[tuple[list[Datum], str]] = []
        self.asked: list[SamplingParams] = []

    def get_tokenizer(self) -> Characters:
        return Characters()

    def save_weights_and_get_sampling_client(self) -> Server:
        return self

    def forward_backward(self, data: list[Datum], loss_fn: str) -> Pending:
        self.passes.append((data, loss_fn))
        self.log.append("pass")
        return Pending(type("", (), {"metrics": {"loss:sum": 10.0}}))

    def optim_step(self, params: Any) -> Pending:
        self.log.append(f"step {params.learning_rate}")
        return Pending(None)

    def sample(self, prompt: Any, count: int, params: SamplingParams) -> Pending:
        self.asked.append(params)
        number = len(self.asked)
        self.log.append(f"ask {number}")
        text = Characters().decode(prompt.to_ints())
        animal = text.partition(" story about ")[2].partition(".")[0].partition(" ")[2]
        texts = [
            (self.good if place < count / 2 else self.bad).format(animal=animal) for place in range(count)
        ]
        sequences = [
            SampledSequence("stop", None, np.array([ord(c) for c in one]), -np.ones(len(one), np.float32))
            for one in texts
        ]
        return Pending(type("", (), {"sequences": sequences}), lambda: self.log.append(f"hear {number}"))


def student(server: Server, *, in_turn: bool = True, seed: int = 1) -> Student:
    return Student(server, seed, examples=EXAMPLES, in_turn=in_turn)  # type: ignore[arg-type]


def rows(datum: Datum, name: str) -> list[float]:
    return datum.loss_fn_inputs[name].to_numpy().tolist()


def test_advantages_of_good_and_bad_stories() -> None:
    server = Server()
    stories = student(server).rehearse_stories(0, 0.5)
    assert len(stories) == ANIMALS_PER_STEP * STORIES_PER_ANIMAL
    assert sum(story.reward for story in stories) == ANIMALS_PER_STEP * STORIES_PER_ANIMAL / 2
    [(data, loss_fn)] = server.passes
    assert loss_fn == "importance_sampling"
    assert len(data) == ANIMALS_PER_STEP * STORIES_PER_ANIMAL
    assert server.log[-2:] == ["pass", "step 0.5"]
    prompts = [len(make_story_prompt(animal)) for animal in choose_animals(1, 0, ANIMALS_PER_STEP)]
    for number, datum in enumerate(data):
        before = prompts[number // STORIES_PER_ANIMAL] - 1
        advantages = rows(datum, "advantages")
        assert advantages[:before] == [0.0] * before
        assert set(advantages[before:]) == {
            0.5 if number % STORIES_PER_ANIMAL < STORIES_PER_ANIMAL / 2 else -0.5
        }
        assert set(rows(datum, "logprobs")[before:]) == {-1.0}
        text = Characters().decode(datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()[before:])
        assert text == stories[number].text


def test_equal_rewards_train_nothing() -> None:
    server = Server(bad="The {animal} sang.")
    assert {story.reward for story in student(server).rehearse_stories(0, 0.5)} == {1.0}
    assert server.passes == []
    assert "step 0.5" not in server.log


def test_in_turn_submits_one_request_at_a_time() -> None:
    server = Server()
    student(server, in_turn=True).rehearse_stories(0, 0.5)
    assert server.log[:4] == ["ask 1", "hear 1", "ask 2", "hear 2"]
    server = Server()
    student(server, in_turn=False).rehearse_stories(0, 0.5)
    assert server.log[:2] == ["ask 1", "ask 2"]


def test_each_request_has_its_own_seed() -> None:
    server = Server()
    for seed in (1, 2):
        for step in range(3):
            student(server, seed=seed).rehearse_stories(step, 0.5)
    assert len({params.seed for params in server.asked}) == len(server.asked) == 6 * ANIMALS_PER_STEP


def test_only_the_answer_of_an_example_has_weight() -> None:
    """The tokens of an answer have weight 1, and those of its prompt have weight 0."""
    server = Server()
    loss = student(server).learn_sorting(0, 0.25)
    [(data, loss_fn)] = server.passes
    assert (len(data), loss_fn) == (EXAMPLES, "cross_entropy")
    assert server.log == ["pass", "step 0.25"]
    counted = 0
    for datum in data:
        text = Characters().decode([*datum.model_input.to_ints(), rows(datum, "target_tokens")[-1]])
        prompt, arrow, answer = text.partition("->")
        assert answer == " " + "".join(sorted(prompt.removeprefix("sort: ").strip())) + "\n"
        weights = rows(datum, "weights")
        assert weights == [0.0] * (len(prompt + arrow) - 1) + [1.0] * len(answer)
        counted += len(answer)
    assert loss == pytest.approx(10.0 / counted)


def test_write_stories() -> None:
    server = Server()
    assert student(server).write_stories(["owl", "bee"]) == [
        RewardedStory("owl", "The owl sang.", 1.0),
        RewardedStory("bee", "The bee sang.", 1.0),
    ]
