"""Measure the built-in model on held-out problems and stories. Uses the engine, not torch.

python -m benchmarks.tiny_model.scores [FOLDER]
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from benchmarks.tiny_model import tasks, words
from benchmarks.tiny_model.corpus import draw_story
from benchmarks.tiny_model.page import END_OF_TURN, TURN
from tinker_sync.local.engine.host import ONE_BLAS_THREAD
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.losses import Example
from tinker_sync.local.engine.model import Weights, load_weights
from tinker_sync.local.engine.sampling import Sampler, SampleSpec
from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.tiny import directory

_ANSWER_TOKENS: Final = 48


@contextmanager
def _one_thread() -> Iterator[None]:
    ONE_BLAS_THREAD.acquire()
    try:
        yield
    finally:
        ONE_BLAS_THREAD.release()


class Score(NamedTuple):
    """One row of the table; `chance` is the value of a model that knows frequencies only."""

    name: str
    value: float
    chance: float


class Model:
    """A model with its tokenizer, by default the built-in one. Not thread-safe.

    >>> Model().answers(["Q: 2+3="])
    ['5']
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or directory()
        self.weights: Weights = load_weights(folder)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def answers(self, prompts: Sequence[str], stop: str = "\n") -> list[str]:
        """Return the greedy continuation of each prompt, up to the token of `stop`."""
        sampler = Sampler(self.weights)
        stops = frozenset(self.encode(stop))
        specs = [
            SampleSpec(
                prompt=np.array(self.encode(prompt)),
                seed=0,
                max_tokens=_ANSWER_TOKENS,
                temperature=0.0,
                stop_tokens=stops,
            )
            for prompt in prompts
        ]
        with _one_thread():
            found = [result.samples[0].tokens.tolist() for result in sampler.run(specs)]
        return [
            self.tokenizer.decode(tokens, skip_special_tokens=False).partition(stop)[0] for tokens in found
        ]

    def logprobs(self, texts: Sequence[str]) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """Return the log-probabilities of the tokens of each text except its first."""
        run = AdapterTrainer(self.weights, LoraSettings(rank=1))
        ids = [np.array(self.encode(text)) for text in texts]
        data = [Example(tokens[:-1], {"target_tokens": tokens[1:]}) for tokens in ids]
        with _one_thread():
            return run.forward(data, "cross_entropy").logprobs


def perplexity(model: Model, stories: int) -> Score:
    """Return the perplexity of held-out stories; chance is a model that knows the token frequencies only."""
    rng = random.Random(11)  # nothing is secret
    texts = [draw_story(rng, held_out=True).text for _ in range(stories)]
    every = np.concatenate(model.logprobs(texts))
    counts = Counter(token for text in texts for token in model.encode(text)[1:])
    whole = counts.total()
    entropy = -sum(count / whole * math.log(count / whole) for count in counts.values())
    return Score("perplexity of stories", float(np.exp(-every.mean())), math.exp(entropy))


def exact(model: Model, kind: str, problems: int, *, chat: bool = False) -> Score:
    """Return the share of held-out problems that the model solves; chance is the commonest answer."""
    rng = random.Random(12)
    asked = [tasks.draw(kind, rng, held_out=True) for _ in range(problems)]
    right = [problem.answer for problem in asked]
    if chat:
        answers = model.answers([tasks.as_chat(kind, problem)[0] for problem in asked], END_OF_TURN)
        right = [tasks.as_chat(kind, problem)[1] for problem in asked]
    else:
        answers = model.answers([problem.prompt for problem in asked])
    share = sum(one == two for one, two in zip(answers, right, strict=True)) / problems
    commonest = Counter(right).most_common(1)[0][1] / problems
    return Score(f"{kind}{', in a chat' if chat else ''}", share, commonest)


def facts(model: Model) -> Score:
    """Return the share of the facts that the model knows; facts are part of its training data."""
    prompts = [f"{TURN}user\n{question}{END_OF_TURN}\n{TURN}assistant\n" for question, _, _ in words.FACTS]
    answers = model.answers(prompts, END_OF_TURN)
    known = sum(
        text in (f"{short[0].upper()}{short[1:]}.", sentence)
        for text, (_, short, sentence) in zip(answers, words.FACTS, strict=True)
    )
    commonest = Counter(short for _, short, _ in words.FACTS).most_common(1)[0][1]
    return Score("facts", known / len(words.FACTS), commonest / len(words.FACTS))


def measure(model: Model, *, problems: int = 500, stories: int = 200) -> list[Score]:
    """Return every score.

    Args:
        model: the model to measure.
        problems: the number of problems of each kind.
        stories: the number of stories.
    """
    found = [perplexity(model, stories)]
    found += [exact(model, kind, problems) for kind in tasks.KINDS]
    found += [exact(model, kind, problems, chat=True) for kind in tasks.KINDS]
    found.append(facts(model))
    return found


def main(argv: list[str]) -> int:
    """Print the scores of the model in the named folder, or of the built-in model."""
    model = Model(Path(argv[0]) if argv else None)
    print(f"{model.weights.count:,} parameters")
    for name, value, chance in measure(model):
        print(f"{name:26} {value:8.3f}   chance {chance:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
