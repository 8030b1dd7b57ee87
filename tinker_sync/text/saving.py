"""Writing a tokenizer's files, in the form in which this and other libraries read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from tinker_sync.text.hub import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from tinker_sync.text.tokenizer import Tokenizer


def save(
    directory: Path, backend: Backend, config: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Write all files of a tokenizer into a directory, which is made; gives their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / TOKENIZER_FILE, directory / CONFIG_FILE]
    backend.save(str(paths[0]))
    text = json.dumps(_config(config, tokenizer), indent=2, ensure_ascii=False)
    paths[1].write_text(text + "\n", encoding="utf-8")
    for place, template in _templates(tokenizer):
        (directory / place).parent.mkdir(exist_ok=True)
        (directory / place).write_text(template, encoding="utf-8")
        paths.append(directory / place)
    return tuple(map(str, paths))


def _config(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """What was read, with what has been set since; added tokens are in the vocabulary's file by now."""
    gone = ("chat_template", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
    kept = {name: value for name, value in config.items() if name not in gone}
    named = tokenizer.special_tokens_map
    kept = {name: value for name, value in kept.items() if not _is_token(name, value) or name in named}
    extra = tokenizer.extra_special_tokens
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **kept,
        "model_max_length": tokenizer.model_max_length,
        "model_input_names": tokenizer.model_input_names,
        "padding_side": tokenizer.padding_side,
        "truncation_side": tokenizer.truncation_side,
        **named,
        **({"extra_special_tokens": extra} if extra else {}),
    }


def _is_token(name: str, value: Any) -> bool:
    return name.endswith("_token") and isinstance(value, (str, dict))


def _templates(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    templates = tokenizer.chat_template
    if templates is None:
        return []
    if isinstance(templates, str):
        return [(TEMPLATE_FILE, templates)]
    return [
        (
            TEMPLATE_FILE if name == "default" else f"additional_chat_templates/{Path(name).name}.jinja",
            template,
        )
        for name, template in templates.items()
    ]
