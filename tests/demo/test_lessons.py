"""What the demo teaches is what it says, from seeds alone, and its exam is not among the lessons."""

from __future__ import annotations

import pytest

from benchmarks.tiny_model import corpus
from tinker_sync.demo import lessons


def digits(problem: lessons.Problem) -> str:
    return problem.prompt.removeprefix("sort: ").removesuffix(" ->")


def test_answers_are_sorted() -> None:
    batch = lessons.sorting_batch(seed=1, step=2, size=200)
    assert len(batch) == 200
    for problem in batch:
        assert problem.answer == " " + "".join(sorted(digits(problem)))
        assert 3 <= len(digits(problem)) <= 5


def test_a_step_depends_on_its_seed_and_number_only() -> None:
    one = lessons.sorting_batch(1, 2, 64)
    assert one == lessons.sorting_batch(1, 2, 64)
    assert one != lessons.sorting_batch(1, 3, 64)
    assert one != lessons.sorting_batch(2, 2, 64)
    assert lessons.story_animals(1, 2, 2) == lessons.story_animals(1, 2, 2)
    assert [lessons.story_animals(seed, 0, 4) for seed in range(3)] != [lessons.story_animals(0, 0, 4)] * 3


def test_the_exam_is_never_taught() -> None:
    exam = lessons.sorting_exam()
    assert exam == lessons.sorting_exam()
    assert len(exam) == 40
    assert {len(digits(problem)) for problem in exam} == {5}
    taught = {problem for step in range(200) for problem in lessons.sorting_batch(0, step, 64)}
    assert not taught & set(exam)


def test_the_built_in_model_was_never_shown_these_tasks() -> None:
    pages = corpus.documents(2)
    text = "".join(next(pages).text for _ in range(5000))
    assert "sort:" not in text
    assert "story about" not in text
    assert all(f" {animal}" in text for animal in lessons.ANIMALS)


def test_each_animal_has_its_turn() -> None:
    asked = [animal for step in range(6) for animal in lessons.story_animals(0, step, 2)]
    assert sorted(asked) == sorted(lessons.ANIMALS)


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [
        ("The owl sang.", True, 1.0),
        ('"Where is my Owl?" asked Tom.', True, 1.0),
        ("The owl saw a cow.", True, 0.5),
        ("The owl sang", True, 0.0),
        ("The owl sang.", False, 0.0),
        ("The cow sang.", True, 0.0),
        ("The owlet sang.", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_rewards(text: str, ended: bool, reward: float) -> None:
    assert lessons.story_reward("owl", text, ended=ended) == reward
