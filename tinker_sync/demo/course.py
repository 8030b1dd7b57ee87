"""`run`: both lessons from beginning to end, on the embedded server or another."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from tinker_sync.clients.service import ServiceClient
from tinker_sync.demo.crash import STEPS_LOST, Wreck, train_and_kill
from tinker_sync.demo.lessons import ANIMALS, Problem, sorting_exam
from tinker_sync.demo.png import Curve, write_png
from tinker_sync.demo.recipe import HOSTED, RECIPE
from tinker_sync.demo.result import DemoResult, Steps, ends
from tinker_sync.demo.screen import Screen
from tinker_sync.demo.student import ASKED, EXAMPLES, TOLD, Student, Telling
from tinker_sync.errors import InvalidInputError

TINY: Final = "tinker-sync/tiny"
RANK: Final = 16
# What suits the built-in model, and what is usual for large ones.
_RATES: Final = (7e-3, 1.5e-3)
_USUAL_RATES: Final = (5e-4, 1e-4)
_SHOWN: Final = 4
_LEAST_STEPS: Final = 2 * STEPS_LOST + 2


class _Sorting(NamedTuple):
    wreck: Wreck
    losses: list[float]
    exam: list[Problem]
    before: list[str]
    after: list[str]

    def share(self, answers: list[str]) -> float:
        right = sum(said == problem.answer for said, problem in zip(answers, self.exam, strict=True))
        return right / len(self.exam)


class _Stories(NamedTuple):
    rewards: list[float]
    before: list[Telling]
    after: list[Telling]


def run(
    base_url: str | None = None,
    *,
    seed: int = 0,
    png: str | Path | None = None,
    steps: Steps | None = None,
    model: str | None = None,
    out: TextIO | None = None,
) -> DemoResult:
    """Fine-tune a model by examples and by reward, showing it all, and check that it learnt.

    On the embedded server this takes less than a minute, and equal seeds give equal curves.

    Args:
        base_url: another server, whose key is found as always; None: the embedded one, started for this.
        seed: decides what is taught, how adapters begin and what is sampled.
        png: also draw the curves into this file.
        steps: fewer or more of them.
        model: what to fine-tune; None: the built-in model.
        out: where to show it; None: stdout.

    Raises:
        InvalidInputError: there are too few steps, the server has no such model, or the curves no place.
        TinkerError: a call failed.
    """
    steps = steps or Steps()
    if steps.supervised < _LEAST_STEPS or steps.reinforced < 1:
        raise InvalidInputError(f"steps: expected at least {_LEAST_STEPS} supervised and 1 reinforced")
    if png is not None and not Path(png).parent.is_dir():
        raise InvalidInputError(f"png: there is no directory {Path(png).parent} to draw the curves in")
    screen, began = Screen(out or sys.stdout), time.monotonic()
    with ServiceClient(base_url=base_url or "local") as service:
        course = _Course(service, screen, seed, steps, model or TINY)
        course.introduce()
        sorting = course.teach_sorting()
        stories = course.teach_stories()
    result = DemoResult(
        losses=tuple(sorting.losses),
        rewards=tuple(stories.rewards),
        checkpoint=sorting.wreck.checkpoint,
        resumed_at=len(sorting.wreck.losses),
        lost=tuple(sorting.wreck.lost),
        lost_exactly=course.embedded,
        sorted_before=sorting.share(sorting.before),
        sorted_after=sorting.share(sorting.after),
        stories_before=tuple(stories.before),
        stories_after=tuple(stories.after),
        seconds=time.monotonic() - began,
    )
    _conclude(screen, result, png)
    return result


class _Course:
    """One run of the demo. Used once, by one thread."""

    def __init__(self, service: ServiceClient, screen: Screen, seed: int, steps: Steps, model: str) -> None:
        self._service = service
        self._screen = screen
        self._seed = seed
        self._steps = steps
        self._model = model
        self._base_url = service.holder.settings.base_url
        self.embedded = service.holder.settings.local is not None
        self._rates = _RATES if model == TINY else _USUAL_RATES

    def introduce(self) -> None:
        """Say what is used, and see that it is there."""
        offered = [one.model_name for one in self._service.get_server_capabilities().supported_models]
        if self._model not in offered:
            listed = ", ".join(name for name in offered if name)
            raise InvalidInputError(f"model: the server does not have {self._model}; it has {listed}")
        kind = "the embedded server, started for this" if self.embedded else "as you asked"
        self._screen.say(f"{self._model} on {self._base_url} ({kind}), seed {self._seed}")

    # ------------------------------------------------------------------------------------- sorting

    def teach_sorting(self) -> _Sorting:
        """By examples, first in a process that is killed, then from its checkpoint."""
        screen, total = self._screen, self._steps.supervised
        screen.heading(f"1. To sort digits, from {total} x {EXAMPLES} examples (supervised learning)")
        exam = sorting_exam()
        before = self._new_student().sorted_answers(exam)
        wreck = self._wreck()
        screen.say(f"saved after step {len(wreck.losses)}: {wreck.checkpoint}")
        screen.say(
            f"{len(wreck.lost)} steps later the process that trained was killed (exit code {wreck.exit_code})"
        )
        training = self._service.create_training_client_from_state_with_optimizer(wreck.checkpoint)
        student = Student(training, self._seed, in_turn=self.embedded)
        losses = list(wreck.losses)
        with screen.progress("resumed", total - len(losses)) as advance:
            for step in range(len(losses), total):
                losses.append(student.learn_sorting(step, self._rate(step)))
                advance(f"loss {losses[-1]:.3f}")
        again = losses[len(wreck.losses) :][: len(wreck.lost)]
        same = "the same losses as before" if again == wreck.lost else f"losses {_few(again)}"
        screen.say(f"resumed from the checkpoint; those steps, repeated, gave {same}: {_few(wreck.lost)}")
        sorting = _Sorting(wreck, losses, exam, before, student.sorted_answers(exam))
        self._show_sorting(sorting)
        return sorting

    def _wreck(self) -> Wreck:
        half = self._steps.supervised // 2
        told = {
            "base_url": self._base_url,
            "model": self._model,
            "rank": RANK,
            "seed": self._seed,
            "rates": [self._rate(step) for step in range(self._steps.supervised)],
            "save_after": half,
        }
        with self._screen.progress("training", half + STEPS_LOST) as advance:
            return train_and_kill(told, lambda loss: advance(f"loss {loss:.3f}"))

    def _rate(self, step: int) -> float:
        """Level for half of the steps, then down to nothing."""
        total = self._steps.supervised
        return self._rates[0] * min(1.0, 2 * (total - step) / total)

    def _new_student(self) -> Student:
        training = self._service.create_lora_training_client(self._model, rank=RANK, seed=self._seed)
        return Student(training, self._seed, in_turn=self.embedded)

    def _show_sorting(self, sorting: _Sorting) -> None:
        self._screen.curve("loss per token", sorting.losses)
        shown = zip(sorting.exam, sorting.before, sorting.after, strict=True)
        rows = [(problem.prompt, one.strip(), two.strip()) for problem, one, two in shown]
        self._screen.table(("asked", "before", "after"), rows[:_SHOWN], first=18)
        before, after = sorting.share(sorting.before), sorting.share(sorting.after)
        count = len(sorting.exam)
        self._screen.say(f"\nof {count} that were not taught, right: {before:.0%} before, {after:.0%} after")

    # ------------------------------------------------------------------------------------- stories

    def teach_stories(self) -> _Stories:
        """By reward alone: nobody shows the model a story about the animal that was asked for."""
        screen, total = self._screen, self._steps.reinforced
        screen.heading(
            f"2. To tell of the animal that was asked for, from {total} x {ASKED * TOLD} rewards "
            "(reinforcement learning)"
        )
        student = self._new_student()
        animals = ANIMALS[:_SHOWN]
        before = student.tell(animals)
        rewards: list[float] = []
        with screen.progress("rehearsing", total) as advance:
            for step in range(total):
                told = student.rehearse_stories(step, self._rates[1])
                rewards.append(sum(telling.reward for telling in told) / len(told))
                advance(f"reward {rewards[-1]:.2f}")
        stories = _Stories(rewards, before, student.tell(animals))
        screen.curve("mean reward", rewards)
        shown = zip(stories.before, stories.after, strict=True)
        rows = [(f"a story about: {one.animal}", one.text, two.text) for one, two in shown]
        screen.table(("asked", "before", "after"), rows, first=20)
        return stories


def _few(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _conclude(screen: Screen, result: DemoResult, png: str | Path | None) -> None:
    curves: list[Any] = [
        Curve("loss per token, supervised", result.losses),
        Curve("mean reward, reinforcement", result.rewards),
    ]
    if png is not None:
        write_png(png, curves)
        screen.say(f"\nthe curves are drawn in {png}")
    screen.heading("The code that does this")
    screen.say(f"\n{RECIPE}\n{HOSTED}")
    (loss, last_loss), (reward, last_reward) = ends(result.losses), ends(result.rewards)
    screen.say(
        f"\nloss {loss:.2f} -> {last_loss:.2f}, reward {reward:.2f} -> {last_reward:.2f}, "
        f"in {result.seconds:.0f} s"
    )
    screen.say("\n".join(f"NOT AS IT SHOULD BE: {problem}" for problem in result.problems) or "all is well")
