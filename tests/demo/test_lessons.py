"""The training data of the demo depend on the seed only, and contain no problem of `make_exam`."""

from __future__ import annotations

import pytest

from benchmarks.tiny_model import corpus
from tinker_sync.demo import lessons


def digits(problem: lessons.SortingProblem) -> str:
    return problem.prompt.removeprefix("sort: ").removesuffix(" ->")


def test_answers_are_sorted() -> None:
    batch = lessons.make_batch(seed=1, step=2, size=200)
    assert len(batch) == 200
    for problem in batch:
        assert problem.answer == " " + "".join(sorted(digits(problem)))
        assert 3 <= len(digits(problem)) <= 5


def test_a_step_depends_on_its_seed_and_number_only() -> None:
    one = lessons.make_batch(1, 2, 64)
    assert one == lessons.make_batch(1, 2, 64)
    assert one != lessons.make_batch(1, 3, 64)
    assert one != lessons.make_batch(2, 2, 64)
    assert lessons.choose_animals(1, 2, 2) == lessons.choose_animals(1, 2, 2)
    assert [lessons.choose_animals(seed, 0, 4) for seed in range(3)] != [lessons.choose_animals(0, 0, 4)] * 3


def test_the_exam_is_not_in_the_lessons() -> None:
    exam = lessons.make_exam()
    assert exam == lessons.make_exam()
    assert len(exam) == 40
    assert {len(digits(problem)) for problem in exam} == {5}
    lesson = {problem for step in range(200) for problem in lessons.make_batch(0, step, 64)}
    assert not lesson & set(exam)


def test_the_tasks_are_not_in_the_training_data() -> None:
    pages = corpus.documents(2)
    text = "".join(next(pages).text for _ in range(5000))
    assert "sort:" not in text
    assert "story about" not in text
    assert all(f" {animal}" in text for animal in lessons.ANIMALS)


def test_animals_take_turns() -> None:
    chosen = [animal for step in range(6) for animal in lessons.choose_animals(0, step, 2)]
    assert sorted(chosen) == sorted(lessons.ANIMALS)


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [
        ("The owl sang.", True, 1.0), ('"Where is my Owl?" asked Tom.', True, 1.0),
        ("The owl saw a cow.", True, 0.5), ("The owl sang", True, 0.0), ("The owl sang.", False, 0.0),
        ("The cow sang.", True, 0.0), ("The owlet sang.", True, 0.0), ("", True, 0.0),
    ],
)  # fmt: skip
def test_rewards(text: str, ended: bool, reward: float) -> None:
    assert lessons.compute_reward("owl", text, ended=ended) == reward
