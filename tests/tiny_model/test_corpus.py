"""The training documents are correct, reproducible, and free of held-out problems."""

from __future__ import annotations

import functools
import itertools
import random
import re

import pytest

from benchmarks.tiny_model import tasks, words
from benchmarks.tiny_model.corpus import documents, draw_story
from benchmarks.tiny_model.page import END_OF_TURN, TURN, Page, is_held_out


@functools.cache
def pages() -> list[Page]:
    return list(itertools.islice(documents(seed=3), 4000))


@functools.cache
def text() -> str:
    return "\n".join(page.text for page in pages())


def test_equal_seeds_give_equal_documents() -> None:
    one, two, other = ([page.text for page in itertools.islice(documents(seed), 50)] for seed in (5, 5, 6))
    assert one == two != other


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


def test_one_sum_in_ten_is_held_out() -> None:
    assert sum(is_held_out(f"Q: {one}+{two}=") for one in range(100) for two in range(100)) == 1000


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


def test_a_problem_is_the_same_in_a_chat() -> None:
    prompt, answer = tasks.as_chat("subtraction", tasks.Problem("Q: 20-3=", "17"))
    assert prompt == "<|im_start|>user\nWhat is 20-3?<|im_end|>\n<|im_start|>assistant\n"
    assert answer == "20-3=17"
    prompt, answer = tasks.as_chat("reverse", tasks.Problem("reverse: a b ->", " b a"))
    assert prompt == "<|im_start|>user\nReverse: a b<|im_end|>\n<|im_start|>assistant\n"
    assert answer == "b a"


def test_random_spans_are_the_drawn_numbers() -> None:
    page = next(page for page in pages() if page.text.startswith("Q: ") and "+" in page.text)
    drawn = [page.text[start:end] for start, end in page.random_spans]
    assert drawn == re.findall(r"\d+\+\d+", page.text)


@pytest.mark.parametrize("cycle", [words.DAYS, words.MONTHS])
def test_days_and_months_form_cycles(cycle: tuple[str, ...]) -> None:
    after = {question: answer for question, answer, _ in words.FACTS if "after" in question}
    kind = "day" if cycle is words.DAYS else "month"
    assert after[f"What {kind} comes after {cycle[-1]}?"] == cycle[0]


def test_each_fact_has_one_answer() -> None:
    questions = [question for question, _, _ in words.FACTS]
    assert len(questions) == len(set(questions)) > 150
