"""`Tokenizer` on small examples: ids, texts, special tokens, shapes, threads, forks.

The interop suite compares it with transformers on texts of every script.
"""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

import tinker_sync
from tinker_sync import InvalidInputError, Tokenizer, TokenizerError


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
    spans = plain("a b", return_offsets_mapping=True)["offset_mapping"]
    assert spans == [(0, 0), (0, 1), (2, 3), (0, 0)]


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
    assert plain.decode([4, 7], clean_up_tokenization_spaces=True) == "a."
    assert plain.decode([]) == ""
    assert plain.batch_decode([]) == []
    assert plain.decode([np.int32(4), np.int32(5)]) == "a b"


@pytest.mark.parametrize(
    "options",
    [
        {"padding": True},
        {"truncation": True, "max_length": 8},
        {"return_tensors": "np"},
        {"return_length": True},
        {"text_pair": "b"},
    ],
)
def test_options_of_transformers_are_refused_by_name(plain: Tokenizer, options: dict[str, Any]) -> None:
    words = rf"Tokenizer has no argument '{next(iter(options))}' any more: get_tokenizer\(backend='transf"
    with pytest.raises(TypeError, match=words):
        plain("a", **options)
    with pytest.raises(TypeError, match=words):
        plain.encode("a", **options)
    with pytest.raises(TypeError, match="add_special_token"):
        plain.encode("a", add_special_token=False)


def test_other_methods_of_transformers_are_named_by_the_error(plain: Tokenizer) -> None:
    for name in ("save_pretrained", "pad", "num_special_tokens_to_add"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; get_tokenizer\(backend='transf"):
            getattr(plain, name)


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
    assert plain.get_vocab()["a"] == 4
    assert plain.get_added_vocab() == {"<s>": 0, "</s>": 1, "<pad>": 2}
    assert repr(plain) == "<Tokenizer WordLevel, 8 tokens>"


# ------------------------------------------------------------------------------------------- files


def test_special_tokens_in_an_older_file_are_not_lost(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["byte-level"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "x", "unk_token": "y"}')
    complete = Tokenizer.from_directory(tmp_path)  # its configuration lists the added tokens
    assert (complete.eos_token, complete.unk_token) == ("<|im_end|>", None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"special_tokens_map.json names eos_token, .*backend='transf"):
        Tokenizer.from_directory(tmp_path)


def test_templates_in_the_configuration_and_beside_it(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["byte-level"], tmp_path, dirs_exist_ok=True)
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


FORKS = """
import os, sys, threading
import tinker_sync
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
