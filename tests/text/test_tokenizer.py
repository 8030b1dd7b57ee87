"""`Tokenizer` on small examples: ids, texts, special tokens, shapes, threads, forks.

The interop suite compares it with transformers on texts of every script.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from support.vocabularies import KINDS, texts
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

import tinker_sync
from tinker_sync import InvalidInputError, MissingExtraError, ModelInput, Tokenizer, TokenizerError

THREADS = 32


@pytest.fixture
def plain() -> Tokenizer:
    """Return a tokenizer with an id for each word, which adds the tokens 0 before a text and 1 after it."""
    words = ["<s>", "</s>", "<pad>", "?", "a", "b", "c", "."]
    backend: Any = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(words[:3])
    tokenizer = Tokenizer(backend)
    tokenizer.eos_token, tokenizer.unk_token_id, tokenizer.pad_token = "</s>", 3, "<pad>"
    return tokenizer


def test_ids_and_texts(plain: Tokenizer) -> None:
    assert plain.encode("a b") == [0, 4, 5, 1]
    assert plain.encode("a b", add_special_tokens=False) == [4, 5]
    assert plain.encode("a zebra") == [0, 4, 3, 1]
    assert plain.encode("") == [0, 1]
    assert plain.encode(["a", "b c"]) == [[0, 4, 1], [0, 5, 6, 1]]
    assert plain("a b") == {"input_ids": [0, 4, 5, 1], "attention_mask": [1, 1, 1, 1]}
    assert plain("a b").input_ids == [0, 4, 5, 1]
    assert plain(["a", "b c"])["attention_mask"] == [[1, 1, 1], [1, 1, 1, 1]]
    assert plain.tokenize("a b") == ["a", "b"]
    assert plain(["a b"]).tokens() == ["<s>", "a", "b", "</s>"]


@pytest.mark.parametrize(
    "ids",
    [
        [0, 4, 5, 1],
        (0, 4, 5, 1),
        np.array([0, 4, 5, 1]),
        np.array([0, 4, 5, 1], np.uint8),
        {"input_ids": [0, 4, 5, 1]},
    ],
)
def test_ids_in_any_container(plain: Tokenizer, ids: Any) -> None:
    assert plain.decode(ids) == "<s> a b </s>"
    assert plain.decode(ids, skip_special_tokens=True) == "a b"
    assert plain.convert_ids_to_tokens(ids if not isinstance(ids, dict) else ids["input_ids"])[1] == "a"


def test_one_id_rows_of_ids_and_ranges(plain: Tokenizer) -> None:
    assert plain.decode(4) == plain.decode(np.int64(4)) == "a"
    assert plain.decode(range(4, 7)) == "a b c"
    assert plain.decode([[4], [5, 6]]) == plain.batch_decode([[4], [5, 6]]) == ["a", "b c"]
    assert plain.decode(np.array([[4, 5], [6, 4]])) == ["a b", "c a"]
    assert plain.batch_decode([4, 5]) == ["a", "b"]
    assert plain.decode([]) == ""
    assert plain.batch_decode([]) == []
    assert plain.decode([np.int32(4), np.int32(5)]) == "a b"


def test_clean_up_follows_the_files(plain: Tokenizer) -> None:
    assert plain.decode([4, 7]) == "a ."
    assert plain.decode([4, 7], clean_up_tokenization_spaces=True) == "a."
    plain.clean_up_tokenization_spaces = True
    assert plain.decode([4, 7]) == "a."
    assert plain.decode([4, 7], clean_up_tokenization_spaces=False) == "a ."


def test_arrays_have_a_row_for_each_text(plain: Tokenizer) -> None:
    made = plain.encode("a b", return_tensors="np")
    assert (made.dtype, made.tolist()) == (np.int64, [[0, 4, 5, 1]])
    padded = plain(["a", "b c"], padding=True, return_tensors="np")
    assert padded["input_ids"].tolist() == [[0, 4, 1, 2], [0, 5, 6, 1]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    with pytest.raises(InvalidInputError, match="rows differ in length; set padding=True"):
        plain(["a", "b c"], return_tensors="np")
    with pytest.raises(InvalidInputError, match="return_tensors: expected 'np' or 'pt', got 'tf'"):
        plain("a", return_tensors="tf")


def test_missing_torch_names_the_extra(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install torch"):
        plain("a", return_tensors="pt")


def test_truncation_keeps_special_tokens(plain: Tokenizer) -> None:
    assert plain.encode("a b c a", truncation=True, max_length=4) == [0, 4, 5, 1]
    plain.truncation_side = "left"
    assert plain.encode("a b c a", truncation=True, max_length=4) == [0, 6, 4, 1]
    assert plain.encode("a b c", truncation=True, max_length=2, add_special_tokens=False) == [5, 6]
    assert plain.encode("a b c", truncation=True) == [0, 4, 5, 6, 1]  # the model has no limit
    plain.model_max_length = 3
    assert plain.encode("a b c", truncation=True) == [0, 6, 1]
    with pytest.raises(InvalidInputError, match="less than the number of special tokens"):
        plain.encode("a b", truncation=True, max_length=1)
    with pytest.raises(InvalidInputError, match="pairs of texts cannot be cut"):
        plain("a b c", "b", truncation=True, max_length=3)


def test_padding_needs_a_token(plain: Tokenizer) -> None:
    plain.padding_side = "left"
    assert plain(["a", "b c"], padding=True).input_ids == [[2, 0, 4, 1], [0, 5, 6, 1]]
    assert plain("a", padding="max_length", max_length=5).input_ids == [2, 2, 0, 4, 1]
    assert plain("a", padding=True, pad_to_multiple_of=4).input_ids == [2, 0, 4, 1]
    plain.pad_token = None
    with pytest.raises(
        InvalidInputError, match=r"no padding token; tokenizer\.pad_token = tokenizer\.eos_token"
    ):
        plain(["a", "b c"], padding=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"padding": "left"}, "padding: expected True"),
        ({"truncation": "tail"}, "truncation: expected True or False"),
        (
            {"padding": True, "truncation": True, "max_length": 5, "pad_to_multiple_of": 4},
            "max_length: 5 is not a multiple of 4",
        ),
    ],
)
def test_invalid_options_are_refused(plain: Tokenizer, options: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        plain("a", **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "text: expected a str or a list of them, got NoneType"),
        ([None], "text: expected a str, got NoneType"),
        (["a", 5], r"text\[1\]: expected a str, got int"),
        pytest.param(
            "ab\ud800",
            r"text\[2\]: half of a surrogate pair",
            marks=pytest.mark.skipif(
                tokenizers.__version__.startswith("0.19."), reason="read as a question mark there"
            ),
        ),
    ],
)
def test_invalid_texts_are_refused(plain: Tokenizer, text: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        plain.encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [1.5]])
def test_invalid_ids_are_refused(plain: Tokenizer, ids: Any) -> None:
    with pytest.raises(InvalidInputError, match="decode: expected token ids"):
        plain.decode(ids)


def test_pairs_need_partners(plain: Tokenizer) -> None:
    with pytest.raises(InvalidInputError, match="text_pair: expected 2, one for each text, got 1"):
        plain(["a", "b"], ["c"])


# ------------------------------------------------------------------------------------------- the vocabulary


def test_special_tokens_by_name(plain: Tokenizer) -> None:
    assert (plain.eos_token, plain.eos_token_id) == ("</s>", 1)
    assert (plain.bos_token, plain.bos_token_id) == (None, None)
    assert plain.special_tokens_map == {"eos_token": "</s>", "unk_token": "?", "pad_token": "<pad>"}
    assert plain.all_special_tokens == ["</s>", "?", "<pad>"]
    assert plain.all_special_ids == [1, 3, 2]
    plain.pad_token = plain.eos_token
    assert plain.pad_token_id == 1
    plain.eos_token_id = 4
    assert plain.eos_token == "a"
    with pytest.raises(InvalidInputError, match="mask_token: '<new>' is not in the vocabulary"):
        plain.mask_token = "<new>"
    with pytest.raises(InvalidInputError, match="mask_token_id: 99 is not in the vocabulary"):
        plain.mask_token_id = 99
    with pytest.raises(AttributeError, match="no attribute 'image_token'"):
        plain.image_token  # noqa: B018  # the access is the test


def test_tokens_and_ids(plain: Tokenizer) -> None:
    assert plain.convert_tokens_to_ids("a") == 4
    assert plain.convert_tokens_to_ids(["a", "zebra"]) == [4, 3]
    assert plain.convert_ids_to_tokens(4) == "a"
    assert plain.convert_ids_to_tokens([4, 1, 99]) == ["a", "</s>", None]
    assert plain.convert_ids_to_tokens([4, 1], skip_special_tokens=True) == ["a"]
    for wrong in (-1, [4, -1]):
        with pytest.raises(InvalidInputError, match="0 or more"):
            plain.convert_ids_to_tokens(wrong)
    assert plain.convert_tokens_to_string(["a", "b"]) == "a b"
    plain.unk_token = None
    assert plain.convert_tokens_to_ids("zebra") is None
    assert (len(plain), plain.vocab_size, bool(plain)) == (8, 8, True)
    assert plain.get_vocab()["a"] == plain.vocab["a"] == 4
    assert plain.get_added_vocab() == {"<s>": 0, "</s>": 1, "<pad>": 2}
    assert plain.num_special_tokens_to_add() == 2
    assert repr(plain) == "<Tokenizer WordLevel, 8 tokens>"


def test_prompts_from_text(plain: Tokenizer) -> None:
    assert ModelInput.from_text("a b", plain).to_ints() == [0, 4, 5, 1]
    assert ModelInput.from_text("a b", plain, add_special_tokens=False).to_ints() == [4, 5]


# ------------------------------------------------------------------------------------------- files


def test_files_do_not_switch_on_truncation(folders: Any) -> None:
    tokenizer = Tokenizer.from_directory(folders["word-piece"])
    long = " ".join(["hello"] * 50)
    assert len(tokenizer.encode(long)) > 24
    assert len(set(map(len, tokenizer([long, "hello"]).input_ids))) == 2
    assert tokenizer.pad_token == "[PAD]"


def test_saved_tokenizer_loads_again(folders: Any, tmp_path: Path) -> None:
    for kind in KINDS:
        tokenizer = Tokenizer.from_directory(folders[kind])
        paths = tokenizer.save_pretrained(tmp_path / kind)
        assert all(Path(path).is_file() for path in paths)
        again = Tokenizer.from_directory(tmp_path / kind)
        assert again.get_vocab() == tokenizer.get_vocab()
        assert again.special_tokens_map == tokenizer.special_tokens_map
        assert again.chat_template == tokenizer.chat_template
        assert again.encode("hello <tool> ¶ world") == tokenizer.encode("hello <tool> ¶ world")


def test_template_names_stay_in_the_directory(plain: Tokenizer, tmp_path: Path) -> None:
    plain.chat_template = {"default": "a", "../../evil": "b"}
    paths = plain.save_pretrained(tmp_path / "deep" / "er")
    assert {Path(path).parent for path in paths} <= {
        tmp_path / "deep" / "er",
        tmp_path / "deep" / "er" / "additional_chat_templates",
    }


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object, got a list"),
        ("tokenizer_config.json", '{"eos_token": 5}', "expected a special token's text"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": "x"}}', "expected an added token"),
        ("tokenizer_config.json", b"\xff", "cannot be read as JSON"),
        ("chat_template.jinja", b"\xff", "cannot be read as UTF-8"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "malformed"),
        ("tokenizer_config.json", '{"chat_template": 5}', "malformed"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "malformed"),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}', "malformed"),
        ("tokenizer_config.json", '{"model_max_length": "many"}', "malformed"),
    ],
)
def test_damaged_files_are_named(
    folders: Any, tmp_path: Path, name: str, content: str | bytes | None, words: str
) -> None:
    Tokenizer.from_directory(folders["byte-level"]).save_pretrained(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.from_directory(tmp_path)
    assert name in str(caught.value)


def test_legacy_template_files(folders: Any, tmp_path: Path) -> None:
    Tokenizer.from_directory(folders["byte-level"]).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}')
    assert Tokenizer.from_directory(tmp_path).chat_template == "older"
    config = (tmp_path / "tokenizer_config.json").read_text()
    listed = '{"chat_template": [{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}],'
    (tmp_path / "tokenizer_config.json").write_text(config.replace("{", listed, 1))
    assert Tokenizer.from_directory(tmp_path).chat_template == {"default": "x", "rag": "y"}
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert Tokenizer.from_directory(tmp_path).chat_template == "newest"


# ------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_are_equal(folders: Any, copied: Any) -> None:
    tokenizer = Tokenizer.from_directory(folders["chat"])
    again = copied(tokenizer)
    assert again.encode("hello world") == tokenizer.encode("hello world")
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.chat_template == tokenizer.chat_template
    assert again.image_token_id == tokenizer.image_token_id


def test_32_threads_share_a_tokenizer(folders: Any) -> None:
    tokenizer = Tokenizer.from_directory(folders["word-piece"])
    sample = texts(50)
    expected = [tokenizer(sample), tokenizer(sample, padding=True, truncation=True, max_length=12)]
    ids = expected[0]["input_ids"]
    decoded = tokenizer.batch_decode(ids, skip_special_tokens=True)
    gate = threading.Barrier(THREADS)

    def work(number: int) -> bool:
        gate.wait(120)
        for round_ in range(4):
            # Neighbouring threads use different options of the shared object at the same time.
            match (number + round_) % 4:
                case 0:
                    assert tokenizer(sample) == expected[0]
                case 1:
                    assert tokenizer(sample, padding=True, truncation=True, max_length=12) == expected[1]
                case 2:
                    assert [tokenizer.encode(text) for text in sample] == ids
                case _:
                    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == decoded
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(future.result(120) for future in [pool.submit(work, number) for number in range(THREADS)])


FORKS = """
import os, sys, threading
import tinker_sync
from tinker_sync.text import loading
tokenizer = tinker_sync.get_tokenizer(sys.argv[1])
sample = ["hello world"] * 500
expected = tokenizer(sample)  # on the library's own threads
stop, busy = threading.Event(), threading.Barrier(5)
def work():
    busy.wait(120)
    while not stop.is_set():
        tokenizer(sample)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
busy.wait(120)
for _ in range(8):
    child = os.fork()
    if child == 0:
        same = tokenizer(sample) == expected and tinker_sync.get_tokenizer(sys.argv[1]) is tokenizer
        other = tinker_sync.get_tokenizer(sys.argv[2])
        os._exit(0 if same and other.encode("hello") else 1)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status))
stop.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing to fork")
@pytest.mark.parametrize("parallelism", [None, "false", "true"])
def test_forked_children_work(folders: Any, parallelism: str | None) -> None:
    variables = {"PYTHONPATH": str(Path(tinker_sync.__file__).parents[1])}
    if parallelism is not None:
        variables["TOKENIZERS_PARALLELISM"] = parallelism
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(folders["byte-level"]), str(folders["unigram"])],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * 8), done.stderr
