"""The built-in model: its files are complete and small, and it solves problems that it has not seen."""

from __future__ import annotations

import configparser
import fnmatch
import functools
import itertools
import json
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.tiny_model import make, scores, tasks
from benchmarks.tiny_model.corpus import documents, draw_story
from benchmarks.tiny_model.page import END_OF_TEXT, END_OF_TURN, TURN, Page, is_held_out
from benchmarks.tiny_model.scores import Model
from tinker_sync.local import tiny
from tinker_sync.local.engine.model import load_config, load_weights
from tinker_sync.local.engine.sampling import Sampler, SampleSpec

ROOT = Path(__file__).parents[2]
FILES = tiny.directory()
NAMES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
SIZE_LIMIT_BYTES = 4_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILES / "tokenizer.json"))


def test_all_files_exist_and_are_small() -> None:
    assert tiny.NAME == "tinker-sync/tiny"
    assert {path.name for path in FILES.iterdir()} == NAMES
    assert sum(path.stat().st_size for path in FILES.iterdir()) < SIZE_LIMIT_BYTES


def test_all_files_ship() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg", encoding="utf-8")
    patterns = declared["options.package_data"]["tinker_sync.local.tiny"].split()
    folder = FILES.parent
    data = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(data) == len(NAMES) + 1
    for path in data:
        name = str(path.relative_to(folder))
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_the_engine_loads_trained_weights() -> None:
    weights = load_weights(FILES)
    assert weights.count < 1_900_000
    assert weights.config.tied
    assert weights.config.qk_norm
    assert all(np.isfinite(array).all() for array in weights.arrays())
    # The weights differ from their start values and have not diverged.
    assert 0.01 < float(weights.layers[0].qkv.std()) < 1
    assert float(np.abs(weights.final_norm - 1).max()) > 0.01


def test_the_configs_match_the_script() -> None:
    assert json.loads((FILES / "config.json").read_text(encoding="utf-8")) == make.model_config()
    assert (
        json.loads((FILES / "tokenizer_config.json").read_text(encoding="utf-8")) == make.tokenizer_config()
    )


def test_the_tokenizer_matches_the_script(tmp_path: Path) -> None:
    make.make_tokenizer(tmp_path / "tokenizer.json")
    made, shipped = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        for folder in (tmp_path, FILES)
    )
    assert made["vocab"] == shipped["vocab"]
    assert made["merges"] == shipped["merges"]


def test_written_weights_are_read_back(tmp_path: Path) -> None:
    tensors = {"a": np.array([[1.0, -0.5, 3.0]]), "b": np.ones(2)}
    make.write_safetensors(tmp_path / "x.safetensors", tensors)
    from tinker_sync.local.engine.model import read_safetensors

    found = read_safetensors(tmp_path / "x.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {
        "a": [[1.0, -0.5, 3.0]],
        "b": [1.0, 1.0],
    }
    (size,) = struct.unpack("<Q", (tmp_path / "x.safetensors").read_bytes()[:8])
    assert size % 8 == 0


@pytest.mark.parametrize(
    "text",
    [
        "Q: 23+45=68\n",
        "It was a cold day. Tom lost the red ball.",
        "reverse: a b c -> c b a",
        "Grüße, 日本, \U0001f600\ttabs\r\n  and \x00 zero",
        f"{TURN}user\nHello!{END_OF_TURN}\n{TURN}assistant\n{END_OF_TEXT}",
        "",
        "   ",
    ],
)
def test_every_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_and_spelled_letter_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == load_config(FILES).vocab_size == make.VOCAB
    assert [tokenizer.token_to_id(token) for token in make.SPECIAL] == [0, 1, 2]
    digits = [token for token in tokenizer.get_vocab() if any(character.isdecimal() for character in token)]
    assert sorted(digits) == list("0123456789")
    assert len(tokenizer.encode(f"{TURN}user{END_OF_TURN}").ids) == 3
    assert all(len(tokenizer.encode(f" {letter}").ids) == 1 for letter in "abcdefghijklmnopqrstuvwxyz")


# ----- Problems that its training documents do not contain
@functools.cache
def pages() -> list[Page]:
    return list(itertools.islice(documents(seed=3), 4000))


@functools.cache
def text() -> str:
    return "\n".join(page.text for page in pages())


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


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.mark.parametrize("kind", tasks.KINDS)
@pytest.mark.parametrize("chat", [False, True])
def test_held_out_problems_are_solved(model: Model, kind: str, chat: bool) -> None:
    name, share, chance = scores.exact(model, kind, 30, chat=chat)
    assert name.startswith(kind)
    assert share > 0.9
    assert chance < 0.2


def test_held_out_stories_are_predicted(model: Model) -> None:
    _, perplexity, chance = scores.perplexity(model, 20)
    assert perplexity < 2
    assert chance > 50


def test_facts_are_known(model: Model) -> None:
    assert scores.facts(model).value > 0.9


def test_stories_end(model: Model) -> None:
    prompt = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    specs = [SampleSpec(prompt=np.array(model.encode(prompt)), seed=0, num_samples=20, max_tokens=150)]
    with scores._one_thread():
        samples = Sampler(model.weights).run(specs)[0].samples
    texts = [model.tokenizer.decode(one.tokens.tolist(), skip_special_tokens=False) for one in samples]
    ended = [text.partition("<|im_end|>")[0] for text in texts if "<|im_end|>" in text]
    assert len(ended) > 15
    assert sum(story.endswith(".") for story in ended) > 15
    assert len(set(ended)) > 15
