"""Rules from model names to tokenizer sources."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinker_sync.text.hub import LLAMA_3, TokenizerSource, looks_like_path, resolve

KIMI_25 = TokenizerSource("moonshotai/Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611", True)


@pytest.mark.parametrize(
    ("model_name", "tokenizer_id", "source"),
    [
        ("org/model", None, TokenizerSource("org/model")),
        ("org/model:peft:131072", None, TokenizerSource("org/model")),
        ("org/model/variant", None, TokenizerSource("org/model")),
        ("org/model/variant:fast", None, TokenizerSource("org/model")),
        ("a/b/c/d", None, TokenizerSource("a/b/c/d")),
        ("gpt2", None, TokenizerSource("gpt2")),
        ("meta-llama/Llama-3.1-8B", None, TokenizerSource(LLAMA_3)),
        ("meta-llama/Llama-3.3-70B-Instruct:x", None, TokenizerSource(LLAMA_3)),
        ("meta-llama/Llama-2-7b", None, TokenizerSource("meta-llama/Llama-2-7b")),
        ("org/model", "org/tok", TokenizerSource("org/tok")),
        ("org/model", "org/tok:131072:peft", TokenizerSource("org/tok")),
        ("org/model", "", TokenizerSource("org/model")),
        # The rules for families apply to model names only, not to the server's tokenizer id.
        ("any", "meta-llama/Llama-3.1-8B", TokenizerSource("meta-llama/Llama-3.1-8B")),
        ("any", "org/model/variant", TokenizerSource("org/model/variant")),
        ("moonshotai/Kimi-K2.5", None, KIMI_25),
        ("moonshotai/Kimi-K2.5-Text-Only", None, KIMI_25),
        ("any", "moonshotai/Kimi-K2.5:x", KIMI_25),
        (
            "moonshotai/Kimi-K2-Thinking",
            None,
            TokenizerSource("moonshotai/Kimi-K2-Thinking", "612681931a8c906ddb349f8ad0f582cb552189cd", True),
        ),
        (
            "moonshotai/Kimi-K2.6",
            None,
            TokenizerSource("moonshotai/Kimi-K2.6", "b5aabbfb20227ed42becbf5541dbffd213942c58", True),
        ),
        (
            "moonshotai/Kimi-K3",
            None,
            TokenizerSource("moonshotai/Kimi-K3", "f831ab66814297da540d832a5235f8e904f29d06", True),
        ),
    ],
)
def test_rules(model_name: str, tokenizer_id: str | None, source: TokenizerSource) -> None:
    assert resolve(model_name, tokenizer_id) == source


def test_directories_resolve_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a:b" / "model"
    place.mkdir(parents=True)
    assert resolve(str(place)) == TokenizerSource(str(place))
    assert resolve("any/model", str(place)) == TokenizerSource(str(place))
    (tmp_path / "alias").symlink_to(place)
    assert resolve(str(tmp_path / "alias")) == TokenizerSource(str(place))
    monkeypatch.chdir(tmp_path)
    assert resolve(os.path.join("a:b", "model")) == TokenizerSource(str(place))
    assert resolve("./missing") == TokenizerSource(str(tmp_path / "missing"))
    assert TokenizerSource("./missing").is_directory


def test_vendor_tokenizers_are_known() -> None:
    assert resolve("TML/x").is_vendor_tokenizer
    assert resolve("any", "thinkingmachines/x").is_vendor_tokenizer
    assert not resolve("thinkingmachineslabinc/x").is_vendor_tokenizer


@pytest.mark.parametrize("name", ["/models/x", "./x", "../x", "~/x"])
def test_paths_look_like_paths(name: str) -> None:
    assert looks_like_path(name)
