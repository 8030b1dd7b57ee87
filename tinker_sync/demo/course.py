"""`run`: both lessons from beginning to end, on the embedded server or another; `main` calls it as a command.

One thread runs a demo. It draws the curves as text, and on demand also into a file, with matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from tinker_sync.clients.service import ServiceClient
from tinker_sync.demo.crash import STEPS_LOST, InterruptedTraining, train_and_kill
from tinker_sync.demo.lessons import ANIMALS, HOSTED, RECIPE, SortingProblem, make_exam
from tinker_sync.demo.result import DemoResult, Steps, measure_ends
from tinker_sync.demo.screen import Screen
from tinker_sync.demo.student import ANIMALS_PER_STEP, EXAMPLES, STORIES_PER_ANIMAL, RewardedStory, Student
from tinker_sync.errors import ConfigurationError, InvalidInputError

TINY: Final = "tinker-sync/tiny"
RANK: Final = 16
# Learning rates of the two lessons: for the built-in model, and for large models.
_TINY_RATES: Final = (7e-3, 1.5e-3)
_LARGE_RATES: Final = (5e-4, 1e-4)
_SHOWN: Final = 4
_LEAST_STEPS: Final = 2 * STEPS_LOST + 2


class _SortingOutcome(NamedTuple):
    interrupted: InterruptedTraining
    losses: list[float]
    exam: list[SortingProblem]
    before: list[str]
    after: list[str]

    def count_share(self, answers: list[str]) -> float:
        right = sum(answer == problem.answer for answer, problem in zip(answers, self.exam, strict=True))
        return right / len(self.exam)


class _StoriesOutcome(NamedTuple):
    rewards: list[float]
    before: list[RewardedStory]
    after: list[RewardedStory]


def run(
    base_url: str | None = None,
    *,
    seed: int = 0,
    png: str | Path | None = None,
    steps: Steps | None = None,
    model: str | None = None,
    out: TextIO | None = None,
) -> DemoResult:
    """Fine-tune a model by examples and by reward, show every step, and check that it learned.

    The result lists the failed checks in `problems`; they raise no error. On the embedded server this takes
    less than a minute, and equal seeds give equal curves.

    Args:
        base_url: another server, whose key is found as for any client; None: the embedded server.
        seed: decides the lessons, the first weights of adapters and all samples.
        png: also draw the curves into this file, with matplotlib.
        steps: the number of steps of each lesson.
        model: the model to fine-tune; None: the built-in one.
        out: the stream to write to; None: stdout.

    Raises:
        InvalidInputError: there are too few steps, the server does not have the model, or the directory of
            `png` does not exist.
        ConfigurationError: `png` is given and matplotlib is not installed.
        TinkerError: a call failed.
    """
    steps = steps or Steps()
    if steps.supervised < _LEAST_STEPS or steps.reinforced < 1:
        raise InvalidInputError(f"steps: expected at least {_LEAST_STEPS} supervised and 1 reinforced")
    if png is not None:
        _check_png(Path(png))
    screen, began = Screen(out or sys.stdout), time.monotonic()
    with ServiceClient(base_url="local:temporary" if base_url in (None, "local") else base_url) as service:
        course = _Course(service, screen, seed, steps, model or TINY, embedded=base_url in (None, "local"))
        course.introduce()
        sorting = course.teach_sorting()
        stories = course.teach_stories()
    result = DemoResult(
        losses=tuple(sorting.losses),
        rewards=tuple(stories.rewards),
        checkpoint=sorting.interrupted.checkpoint,
        resumed_at=len(sorting.interrupted.losses),
        lost=tuple(sorting.interrupted.lost),
        lost_exactly=course.embedded,
        sorted_before=sorting.count_share(sorting.before),
        sorted_after=sorting.count_share(sorting.after),
        stories_before=tuple(stories.before),
        stories_after=tuple(stories.after),
        seconds=time.monotonic() - began,
    )
    if png is not None:
        _write_png(png, result)
        screen.write()
        screen.paragraph(f"the curves are drawn in {png}")
    _conclude(screen, result)
    return result


class _Course:
    """The two lessons of one demo: it teaches them with one client and shows them. Not thread-safe."""

    def __init__(
        self, service: ServiceClient, screen: Screen, seed: int, steps: Steps, model: str, *, embedded: bool
    ) -> None:
        self._service = service
        self._screen = screen
        self._seed = seed
        self._steps = steps
        self._model = model
        self._base_url = service.holder.settings.base_url
        self.embedded = embedded
        self._rates = _TINY_RATES if model == TINY else _LARGE_RATES

    def introduce(self) -> None:
        """Check that the server offers the model, and show the server and the model."""
        offered = [one.model_name for one in self._service.get_server_capabilities().supported_models]
        if self._model not in offered:
            listed = ", ".join(name for name in offered if name)
            raise InvalidInputError(f"model: the server does not have {self._model}; it has {listed}")
        kind = "the embedded server" if self.embedded else "as you asked"
        self._screen.paragraph(f"{self._model} on {self._base_url} ({kind}), seed {self._seed}")

    # ------------------------------------------------------------------------------------- sorting

    def teach_sorting(self) -> _SortingOutcome:
        """Teach the model to sort by examples: in a process that is killed, then from its checkpoint."""
        screen, total = self._screen, self._steps.supervised
        screen.heading(f"1. To sort digits, from {total} x {EXAMPLES} examples (supervised learning)")
        exam = make_exam()
        before = self._new_student().answer_problems(exam)
        interrupted = self._train_and_kill()
        screen.paragraph(f"saved after step {len(interrupted.losses)}: {interrupted.checkpoint}")
        screen.paragraph(
            f"{len(interrupted.lost)} steps later the training process was killed "
            f"(exit code {interrupted.exit_code})"
        )
        training = self._service.create_training_client_from_state_with_optimizer(interrupted.checkpoint)
        student = Student(training, self._seed, examples=EXAMPLES, in_turn=self.embedded)
        losses = list(interrupted.losses)
        with screen.progress("resumed", total - len(losses)) as advance:
            for step in range(len(losses), total):
                losses.append(student.learn_sorting(step, self._choose_rate(step)))
                advance(f"loss {losses[-1]:.3f}")
        repeated = losses[len(interrupted.losses) :][: len(interrupted.lost)]
        same = "the same losses as before" if repeated == interrupted.lost else f"losses {_format(repeated)}"
        screen.paragraph(
            f"resumed from the checkpoint; those steps, repeated, gave {same}: {_format(interrupted.lost)}"
        )
        sorting = _SortingOutcome(interrupted, losses, exam, before, student.answer_problems(exam))
        self._show_sorting(sorting)
        return sorting

    def _train_and_kill(self) -> InterruptedTraining:
        half = self._steps.supervised // 2
        orders = {
            "base_url": self._base_url,
            "model": self._model,
            "rank": RANK,
            "seed": self._seed,
            "examples": EXAMPLES,
            "rates": [self._choose_rate(step) for step in range(self._steps.supervised)],
            "save_after": half,
        }
        with self._screen.progress("training", half + STEPS_LOST) as advance:
            return train_and_kill(orders, lambda loss: advance(f"loss {loss:.3f}"))

    def _choose_rate(self, step: int) -> float:
        """Return the learning rate of a step: constant for half of the steps, then falling towards zero."""
        total = self._steps.supervised
        return self._rates[0] * min(1.0, 2 * (total - step) / total)

    def _new_student(self) -> Student:
        training = self._service.create_lora_training_client(self._model, rank=RANK, seed=self._seed)
        return Student(training, self._seed, examples=EXAMPLES, in_turn=self.embedded)

    def _show_sorting(self, sorting: _SortingOutcome) -> None:
        self._screen.curve("loss per token", sorting.losses)
        shown = zip(sorting.exam, sorting.before, sorting.after, strict=True)
        rows = [(problem.prompt, one.strip(), two.strip()) for problem, one, two in shown]
        self._screen.table(("prompt", "before", "after"), rows[:_SHOWN], first=18)
        before, after = sorting.count_share(sorting.before), sorting.count_share(sorting.after)
        count = len(sorting.exam)
        self._screen.write()
        self._screen.paragraph(
            f"right answers to {count} new problems: {before:.0%} before, {after:.0%} after"
        )

    # ------------------------------------------------------------------------------------- stories

    def teach_stories(self) -> _StoriesOutcome:
        """Teach the model to write about the right animal by reward alone, without an example."""
        screen, total = self._screen, self._steps.reinforced
        count = ANIMALS_PER_STEP * STORIES_PER_ANIMAL
        screen.heading(
            f"2. To write about the right animal, from {total} x {count} rewards (reinforcement learning)"
        )
        student = self._new_student()
        animals = ANIMALS[:_SHOWN]
        before = student.write_stories(animals)
        rewards: list[float] = []
        with screen.progress("rehearsing", total) as advance:
            for step in range(total):
                written = student.rehearse_stories(step, self._rates[1])
                rewards.append(sum(story.reward for story in written) / len(written))
                advance(f"reward {rewards[-1]:.2f}")
        stories = _StoriesOutcome(rewards, before, student.write_stories(animals))
        screen.curve("mean reward", rewards)
        shown = zip(stories.before, stories.after, strict=True)
        rows = [(f"a story about: {one.animal}", one.text, two.text) for one, two in shown]
        screen.table(("prompt", "before", "after"), rows, first=20)
        return stories


def _format(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _check_png(path: Path) -> None:
    if not path.parent.is_dir():
        raise InvalidInputError(f"png: there is no directory {path.parent} to draw the curves in")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("png: matplotlib is not installed; pip install matplotlib")


def _write_png(path: str | Path, result: DemoResult) -> None:
    # `Figure` instead of pyplot, which keeps global state and may open a window.
    figure: Any = importlib.import_module("matplotlib.figure").Figure(
        figsize=(6.4, 6.0), layout="constrained"
    )
    curves = (("loss per token, supervised", result.losses), ("mean reward, reinforcement", result.rewards))
    for axes, (title, values) in zip(figure.subplots(len(curves), 1), curves, strict=True):
        axes.plot(range(1, len(values) + 1), values)
        axes.set_title(title)
        axes.set_xlabel("step")
    figure.savefig(path, format="png")


def _conclude(screen: Screen, result: DemoResult) -> None:
    screen.heading("The code that does this")
    screen.write(f"\n{RECIPE}")
    screen.paragraph(HOSTED)
    (loss, last_loss), (reward, last_reward) = measure_ends(result.losses), measure_ends(result.rewards)
    screen.write()
    screen.paragraph(
        f"mean of the first and of the last steps: loss {loss:.2f} -> {last_loss:.2f}, "
        f"reward {reward:.2f} -> {last_reward:.2f}; in {result.seconds:.0f} s"
    )
    for line in [f"FAILED: {problem}" for problem in result.problems] or ["all checks passed"]:
        screen.paragraph(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo as a command and return its exit code: 0 if all checks passed, else 1.

    Args:
        argv: the arguments; None: the command line of this process.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    SystemExit: 0
    """
    default = Steps()
    parser = argparse.ArgumentParser(
        prog="tinker-sync demo",
        description="Fine-tune the built-in model by examples and by reward, in under a minute.",
    )
    parser.add_argument("--base-url", help="another server than the embedded one")
    parser.add_argument("--model", help="the model to fine-tune instead of the built-in one")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal curves")
    parser.add_argument("--png", metavar="FILE", help="also draw the curves into a file, with matplotlib")
    parser.add_argument("--supervised", type=int, default=default.supervised, metavar="STEPS")
    parser.add_argument("--reinforced", type=int, default=default.reinforced, metavar="STEPS")
    options = parser.parse_args(argv)
    steps = Steps(supervised=options.supervised, reinforced=options.reinforced)
    return run(
        options.base_url, seed=options.seed, png=options.png, steps=steps, model=options.model
    ).exit_code
