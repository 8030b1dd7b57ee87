"""Which tokenizer belongs to which name: the rules in their order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinker_sync.text.resolve import LLAMA_3, Source, looks_like_path, resolve

KIMI_25 = Source("moonshotai/Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611", True)


@pytest.mark.parametrize(
    ("model_name", "tokenizer_id", "source"),
    [
        ("org/model", None, Source("org/model")),
        ("org/model:peft:131072", None, Source("org/model")),
        ("org/model/variant", None, Source("org/model")),
        ("org/model/variant:fast", None, Source("org/model")),
        ("a/b/c/d", None, Source("a/b/c/d")),
        ("gpt2", None, Source("gpt2")),
        ("meta-llama/Llama-3.1-8B", None, Source(LLAMA_3)),
        ("meta-llama/Llama-3.3-70B-Instruct:x", None, Source(LLAMA_3)),
        ("meta-llama/Llama-2-7b", None, Source("meta-llama/Llama-2-7b")),
        ("org/model", "org/tok", Source("org/tok")),
        ("org/model", "org/tok:131072:peft", Source("org/tok")),
        ("org/model", "", Source("org/model")),
        # What the server says is taken by its word; only names are read by family.
        ("any", "meta-llama/Llama-3.1-8B", Source("meta-llama/Llama-3.1-8B")),
        ("any", "org/model/variant", Source("org/model/variant")),
        ("moonshotai/Kimi-K2.5", None, KIMI_25),
        ("moonshotai/Kimi-K2.5-Text-Only", None, KIMI_25),
        ("any", "moonshotai/Kimi-K2.5:x", KIMI_25),
        (
            "moonshotai/Kimi-K2-Thinking",
            None,
            Source("moonshotai/Kimi-K2-Thinking", "612681931a8c906ddb349f8ad0f582cb552189cd", True),
        ),
        (
            "moonshotai/Kimi-K2.6",
            None,
            Source("moonshotai/Kimi-K2.6", "b5aabbfb20227ed42becbf5541dbffd213942c58", True),
        ),
        (
            "moonshotai/Kimi-K3",
            None,
            Source("moonshotai/Kimi-K3", "f831ab66814297da540d832a5235f8e904f29d06", True),
        ),
    ],
)
def test_rules(model_name: str, tokenizer_id: str | None, source: Source) -> None:
    assert resolve(model_name, tokenizer_id) == source


def test_a_directory_is_itself_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a:b" / "model"
    place.mkdir(parents=True)
    assert resolve(str(place)) == Source(str(place))
    assert resolve("any/model", str(place)) == Source(str(place))
    (tmp_path / "alias").symlink_to(place)
    assert resolve(str(tmp_path / "alias")) == Source(str(place))
    monkeypatch.chdir(tmp_path)
    assert resolve(os.path.join("a:b", "model")) == Source(str(place))
    assert resolve("./missing") == Source(str(tmp_path / "missing"))
    assert Source("./missing").is_directory


def test_the_vendors_own_models_are_known() -> None:
    assert resolve("TML/x").is_of_the_house
    assert resolve("any", "thinkingmachines/x").is_of_the_house
    assert not resolve("thinkingmachineslabinc/x").is_of_the_house


@pytest.mark.parametrize("name", ["/models/x", "./x", "../x", "~/x"])
def test_paths_look_like_paths(name: str) -> None:
    assert looks_like_path(name)
