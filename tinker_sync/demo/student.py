"""`Student`: a model in training, with methods for a step of each lesson and for the answers of the model.

The module uses the public clients only, from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tinker_sync.data import from_completion, from_samples
from tinker_sync.demo.lessons import (
    SortingProblem,
    choose_animals,
    compute_reward,
    make_batch,
    make_story_prompt,
)
from tinker_sync.types import AdamParams, ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.types import SampledSequence

EXAMPLES: Final = 64
"""Problems in a step of supervised learning."""
ANIMALS_PER_STEP: Final = 2
STORIES_PER_ANIMAL: Final = 24
_ANSWER_TOKENS: Final = 12
_STORY_TOKENS: Final = 72


class RewardedStory(NamedTuple):
    """A sampled story and its reward."""

    animal: str
    text: str
    reward: float


class Student:
    """A training client with its tokenizer. Not thread-safe.

    Args:
        training: the client of the model.
        seed: decides the lessons and all samples.
        examples: the number of problems in a step of supervised learning.
        in_turn: submit one request for stories at a time. Rounding depends on the requests that the server
            computes together, so equal seeds give equal curves only this way.
    """

    def __init__(self, training: TrainingClient, seed: int, *, examples: int, in_turn: bool) -> None:
        self.training = training
        self._seed = seed
        self._examples = examples
        self._in_turn = in_turn
        self._tokenizer: Any = training.get_tokenizer()

    # ------------------------------------------------------------------------------------- by examples

    def learn_sorting(self, step: int, rate: float) -> float:
        """Take one step of supervised learning; return the loss per token of the answers."""
        problems = make_batch(self._seed, step, self._examples)
        data = [from_completion(one.prompt, f"{one.answer}\n", self._tokenizer) for one in problems]
        passed = self.training.forward_backward(data, "cross_entropy")
        stepped = self.training.optim_step(AdamParams(learning_rate=rate))
        counted = sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data)
        stepped.result()
        return passed.result().metrics["loss:sum"] / counted

    def answer_problems(self, problems: Sequence[SortingProblem]) -> list[str]:
        """Return the likeliest answer to each problem, in order, with the present weights."""
        sampling = self.training.save_weights_and_get_sampling_client()
        params = SamplingParams(
            max_tokens=_ANSWER_TOKENS, temperature=0.0, seed=self._seed, stop=self._encode("\n")
        )
        futures = [sampling.sample(self._prompt(problem.prompt), 1, params) for problem in problems]
        return [self._decode(future.result().sequences[0]).rstrip() for future in futures]

    # ------------------------------------------------------------------------------------- by reward

    def rehearse_stories(self, step: int, rate: float) -> list[RewardedStory]:
        """Take one step of reinforcement learning, and return its stories.

        The advantage of a story is its reward minus the mean reward of all stories about the same animal. If
        all advantages are 0, the weights stay as they are.
        """
        sampling = self.training.save_weights_and_get_sampling_client()
        data, stories = [], []
        for animal, sequences in self._sample_stories(
            sampling, step, choose_animals(self._seed, step, ANIMALS_PER_STEP), STORIES_PER_ANIMAL
        ):
            group = [self._rate(animal, sequence) for sequence in sequences]
            mean = sum(story.reward for story in group) / len(group)
            advantages = [story.reward - mean for story in group]
            if any(advantages):
                data += from_samples(self._prompt(make_story_prompt(animal)), sequences, advantages)
            stories += group
        if data:
            passed = self.training.forward_backward(data, "importance_sampling")
            self.training.optim_step(AdamParams(learning_rate=rate)).result()
            passed.result()
        return stories

    def write_stories(self, animals: Sequence[str]) -> list[RewardedStory]:
        """Sample a story about each animal with the present weights."""
        sampling = self.training.save_weights_and_get_sampling_client()
        sampled = self._sample_stories(sampling, 0, animals, 1)
        return [self._rate(animal, sequences[0]) for animal, sequences in sampled]

    def _sample_stories(
        self, sampling: SamplingClient, step: int, animals: Sequence[str], count: int
    ) -> list[tuple[str, list[SampledSequence]]]:
        futures = []
        for number, animal in enumerate(animals):
            params = SamplingParams(
                max_tokens=_STORY_TOKENS,
                seed=(self._seed * 1000 + step) * 100 + number,
                stop=self._encode("<|im_end|>"),
            )
            futures.append(sampling.sample(self._prompt(make_story_prompt(animal)), count, params))
            if self._in_turn:
                futures[-1].result()
        sampled = [list(future.result().sequences) for future in futures]
        return list(zip(animals, sampled, strict=True))

    def _rate(self, animal: str, sequence: SampledSequence) -> RewardedStory:
        text = self._decode(sequence).strip()
        return RewardedStory(animal, text, compute_reward(animal, text, ended=sequence.stop_reason == "stop"))

    # ------------------------------------------------------------------------------------- text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _prompt(self, text: str) -> ModelInput:
        return ModelInput.from_ints(self._encode(text))

    def _decode(self, sequence: SampledSequence) -> str:
        return str(self._tokenizer.decode(sequence.tokens, skip_special_tokens=True))
