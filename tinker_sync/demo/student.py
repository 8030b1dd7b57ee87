"""A model that is being taught, through the clients alone: one step of either kind, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tinker_sync.data import from_completion, from_samples
from tinker_sync.demo.lessons import Problem, sorting_batch, story_animals, story_prompt, story_reward
from tinker_sync.types import AdamParams, ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.types import SampledSequence

EXAMPLES: Final = 64
"""Problems in a step of supervised learning."""
ASKED: Final = 2
"""Animals in a step of reinforcement learning."""
TOLD: Final = 24
"""Stories about each."""
_ANSWER_TOKENS: Final = 12
_STORY_TOKENS: Final = 72


class Telling(NamedTuple):
    """A story and what it earned."""

    animal: str
    text: str
    reward: float


class Student:
    """A training client with its tokenizer. Not thread-safe.

    Args:
        training: the model that learns.
        seed: decides what it is taught and every draw.
        in_turn: have the server compute one sample request at a time. How numbers are rounded depends on what
            is computed together; so equal seeds give equal curves.
    """

    def __init__(self, training: TrainingClient, seed: int, *, in_turn: bool) -> None:
        self.training = training
        self._seed = seed
        self._in_turn = in_turn
        self._tokenizer: Any = training.get_tokenizer()

    # ------------------------------------------------------------------------------------- by examples

    def learn_sorting(self, step: int, rate: float) -> float:
        """One step of supervised learning. Gives the loss per token of the answers."""
        problems = sorting_batch(self._seed, step, EXAMPLES)
        data = [from_completion(one.prompt, f"{one.answer}\n", self._tokenizer) for one in problems]
        passed = self.training.forward_backward(data, "cross_entropy")
        stepped = self.training.optim_step(AdamParams(learning_rate=rate))
        counted = sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data)
        stepped.result()
        return passed.result().metrics["loss:sum"] / counted

    def sorted_answers(self, problems: Sequence[Problem]) -> list[str]:
        """The likeliest answer to each problem, by the weights of this moment."""
        sampling = self.training.save_weights_and_get_sampling_client()
        params = SamplingParams(
            max_tokens=_ANSWER_TOKENS, temperature=0.0, seed=self._seed, stop=self._encode("\n")
        )
        futures = [sampling.sample(self._prompt(problem.prompt), 1, params) for problem in problems]
        return [self._text(future.result().sequences[0]).rstrip() for future in futures]

    # ------------------------------------------------------------------------------------- by reward

    def rehearse_stories(self, step: int, rate: float) -> list[Telling]:
        """One step of reinforcement learning: stories about some animals, several about each.

        What counts is by how much a story is better than the others about its animal.
        """
        sampling = self.training.save_weights_and_get_sampling_client()
        data, told = [], []
        for animal, sequences in self._stories(sampling, step, story_animals(self._seed, step, ASKED), TOLD):
            tellings = [self._told(animal, sequence) for sequence in sequences]
            mean = sum(telling.reward for telling in tellings) / len(tellings)
            advantages = [telling.reward - mean for telling in tellings]
            if any(advantages):
                data += from_samples(self._prompt(story_prompt(animal)), sequences, advantages)
            told += tellings
        if data:
            passed = self.training.forward_backward(data, "importance_sampling")
            self.training.optim_step(AdamParams(learning_rate=rate)).result()
            passed.result()
        return told

    def tell(self, animals: Sequence[str]) -> list[Telling]:
        """A story about each, by the weights of this moment."""
        sampling = self.training.save_weights_and_get_sampling_client()
        return [self._told(animal, told[0]) for animal, told in self._stories(sampling, 0, animals, 1)]

    def _stories(
        self, sampling: SamplingClient, step: int, animals: Sequence[str], count: int
    ) -> list[tuple[str, list[SampledSequence]]]:
        futures = []
        for number, animal in enumerate(animals):
            params = SamplingParams(
                max_tokens=_STORY_TOKENS,
                seed=(self._seed * 1000 + step) * 100 + number,
                stop=self._encode("<|im_end|>"),
            )
            futures.append(sampling.sample(self._prompt(story_prompt(animal)), count, params))
            if self._in_turn:
                futures[-1].result()
        sampled = [list(future.result().sequences) for future in futures]
        return list(zip(animals, sampled, strict=True))

    def _told(self, animal: str, sequence: SampledSequence) -> Telling:
        text = self._text(sequence).strip()
        return Telling(animal, text, story_reward(animal, text, ended=sequence.stop_reason == "stop"))

    # ------------------------------------------------------------------------------------- text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _prompt(self, text: str) -> ModelInput:
        return ModelInput.from_ints(self._encode(text))

    def _text(self, sequence: SampledSequence) -> str:
        return str(self._tokenizer.decode(sequence.tokens, skip_special_tokens=True))
