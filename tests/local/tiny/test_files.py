"""The files of the built-in model are complete, small, and readable by the engine and by tokenizers."""

from __future__ import annotations

import configparser
import fnmatch
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.tiny_model import make
from benchmarks.tiny_model.page import END_OF_TEXT, END_OF_TURN, TURN
from tinker_sync.local import tiny
from tinker_sync.local.engine.model import load_config, load_weights

ROOT = Path(__file__).parents[3]
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
