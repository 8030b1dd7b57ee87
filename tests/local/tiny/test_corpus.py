"""What the built-in model reads: problems are right, what is asked later is not among it, seeds decide."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from tinker_sync.local.tiny import tasks, words
from tinker_sync.local.tiny.corpus import documents, told
from tinker_sync.local.tiny.page import END_OF_TURN, TURN, held_out

PAGES = list(itertools.islice(documents(seed=3), 4000))
TEXT = "\n".join(page.text for page in PAGES)


def test_equal_seeds_give_equal_documents() -> None:
    one, two, other = ([page.text for page in itertools.islice(documents(seed), 50)] for seed in (5, 5, 6))
    assert one == two != other


def test_every_sum_is_right_and_below_a_hundred() -> None:
    sums = re.findall(r"(\d+)([+-])(\d+)=(\d+)", TEXT)
    assert len(sums) > 2000
    for one, sign, two, result in sums:
        assert max(int(one), int(two)) < 100
        assert int(result) == int(one) + (int(two) if sign == "+" else -int(two))


def test_every_copy_and_reversal_is_right() -> None:
    lines = re.findall(r"^(copy|reverse): (.+) -> (.+)$", TEXT, flags=re.MULTILINE)
    assert len(lines) > 1000
    for kind, given, result in lines:
        items, got = (text.split(" ") if " " in text else list(text) for text in (given, result))
        assert got == (items if kind == "copy" else items[::-1])


def test_nothing_that_is_asked_later_is_read() -> None:
    read = {f"Q: {problem}=" for problem in re.findall(r"(\d+[+-]\d+)=", TEXT)}
    read |= set(re.findall(r"^((?:copy|reverse): .+ ->)", TEXT, flags=re.MULTILINE))
    asked = re.findall(r"^(Copy|Reverse): (.+)<\|im_end\|>$", TEXT, flags=re.MULTILINE)
    assert len(asked) > 50
    read |= {f"{kind.lower()}: {items} ->" for kind, items in asked}
    assert len(read) > 2000
    assert not [prompt for prompt in read if held_out(prompt)]
    rng = random.Random(1)
    later = {tasks.draw(kind, rng, asked_later=True).prompt for kind in tasks.KINDS for _ in range(300)}
    assert all(held_out(prompt) for prompt in later)
    assert not later & read


def test_one_in_ten_sums_is_asked_later() -> None:
    assert sum(held_out(f"Q: {one}+{two}=") for one in range(100) for two in range(100)) == 1000


def test_stories_that_are_asked_later_are_not_read() -> None:
    stories = {told(random.Random(seed), asked_later=True).text for seed in range(200)}
    assert len(stories) > 150
    assert not [story for story in stories if story in TEXT]


def test_questions_about_a_story_are_answered_by_it() -> None:
    asked = 0
    for seed in range(500):
        story = told(random.Random(seed), asked_later=False)
        for question, answer in story.questions:
            asked += 1
            said = answer.removeprefix("to ").removeprefix("a ")
            assert question.endswith("?")
            assert said in story.text, (story, question)
    assert asked > 500


def test_chats_are_whole() -> None:
    chats = [page.text for page in PAGES if page.text.startswith(TURN)]
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


def test_what_is_dull_is_what_was_drawn() -> None:
    page = next(page for page in PAGES if page.text.startswith("Q: ") and "+" in page.text)
    drawn = [page.text[start:end] for start, end in page.dull]
    assert drawn == re.findall(r"\d+\+\d+", page.text)


@pytest.mark.parametrize("cycle", [words.DAYS, words.MONTHS])
def test_facts_of_cycles_close(cycle: tuple[str, ...]) -> None:
    after = {question: answer for question, answer, _ in words.FACTS if "after" in question}
    kind = "day" if cycle is words.DAYS else "month"
    assert after[f"What {kind} comes after {cycle[-1]}?"] == cycle[0]


def test_facts_have_one_answer_each() -> None:
    questions = [question for question, _, _ in words.FACTS]
    assert len(questions) == len(set(questions)) > 150
