"""What the files beside a tokenizer say about it: special tokens, chat templates, settings.

Read once per load, from small JSON and text files; the vocabulary itself is read by `tokenizers` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tinker_sync.errors import TokenizerError
from tinker_sync.text.hub import CONFIG_FILE, LEGACY, TEMPLATE_FILE

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens every tokenizer may have, in the order in which they are listed."""

Templates = str | dict[str, str] | None
"""A chat template, several by name, or none."""

_MORE_TEMPLATES: Final = "additional_chat_templates"
_UNBOUNDED: Final = int(1e30)


@frozen
class Setup:
    """What a tokenizer is besides its vocabulary."""

    named: dict[str, str]
    """Special tokens by their names, the usual ones first."""
    extra: list[str]
    """Special tokens without a name."""
    added: list[AddedToken | str]
    """Tokens the configuration asks for, whether or not the vocabulary has them already."""
    templates: Templates
    model_max_length: int
    model_input_names: list[str]
    padding_side: str
    truncation_side: str
    clean_up_spaces: bool
    clean_up_bpe_too: bool
    split_special_tokens: bool
    config: dict[str, Any] = field(repr=False)
    """The configuration as it was read, to be saved again."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got a {type(tree).__name__}")
    return tree


def read_setup(directory: Path | None, backend: Backend) -> Setup:
    """What the files of a directory say about the tokenizer that was loaded from it; None: there are none."""
    original = {} if directory is None else read_json(directory / CONFIG_FILE)
    config = {name: _with_tokens(value) for name, value in original.items()}
    if not config.get("extra_special_tokens"):
        _rename_older(config)
    listed = config.get("added_tokens_decoder")
    if listed is None:
        added = _merge_legacy(directory, backend, config)
    else:
        added = {int(index): _added(token) for index, token in listed.items()}
    if backend.padding is not None:
        config.setdefault("pad_token", backend.padding["pad_token"])
        config.setdefault("padding_side", backend.padding["direction"])
    extra = config.get("extra_special_tokens") or []
    named = _named(config, extra if isinstance(extra, Mapping) else {})
    unnamed = [] if isinstance(extra, Mapping) else list(extra)
    return Setup(
        named={name: str(_content(token)) for name, token in named.items()},
        extra=[str(_content(token)) for token in unnamed],
        added=_to_add(added, named, unnamed, backend),
        templates=None if directory is None else _templates(directory, config.get("chat_template")),
        model_max_length=config.get("model_max_length") or config.get("max_len") or _UNBOUNDED,
        model_input_names=list(config.get("model_input_names") or ("input_ids", "attention_mask")),
        padding_side=config.get("padding_side", "right"),
        truncation_side=config.get("truncation_side", "right"),
        clean_up_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
        clean_up_bpe_too=bool(
            config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        ),
        split_special_tokens=bool(config.get("split_special_tokens", False)),
        config=original,
    )


# ------------------------------------------------------------------------------------------- tokens


def _with_tokens(value: Any) -> Any:
    """Saved tokens become tokens, wherever they stand."""
    if isinstance(value, dict):
        if value.get("__type") == "AddedToken":
            return _added(value)
        return {name: _with_tokens(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_tokens(item) for item in value]
    return value


def _added(token: Any) -> AddedToken:
    if isinstance(token, AddedToken):
        return token
    if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
        raise TokenizerError(f"{CONFIG_FILE}: expected an added token, got {token!r}")
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(**{name: token[name] for name in known if name in token})


def _content(token: Any) -> str:
    """The text of a token, given as text, as a token or as one saved without its type."""
    if isinstance(token, AddedToken):
        return token.content
    if isinstance(token, Mapping):
        return _added(token).content
    if not isinstance(token, str):
        raise TokenizerError(f"{CONFIG_FILE}: expected a special token's text, got {token!r}")
    return token


def _merge_legacy(directory: Path | None, backend: Backend, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Added tokens where the configuration lists none: from files of their own and the vocabulary's file.

    What `special_tokens_map.json` says wins over the configuration.
    """
    named, ids = ({}, {}) if directory is None else (read_json(directory / name) for name in LEGACY)
    for name, value in named.items():
        if name == "extra_special_tokens" and isinstance(value, list):
            known = [_content(token) for token in config.get(name) or []]
            new = [_special(token) for token in value if _content(token) not in known]
            config[name] = [*(config.get(name) or []), *new]
        else:
            config[name] = _special(value)
    special = {_content(config[name]) for name in NAMED if config.get(name)}
    extra = config.get("extra_special_tokens") or []
    special |= {_content(token) for token in (extra.values() if isinstance(extra, Mapping) else extra)}
    added = {
        int(index): AddedToken(text, normalized=text not in special, special=text in special)
        for text, index in ids.items()
    }
    if "extra_special_tokens" not in config:
        _rename_older(config)
    return {**added, **backend.get_added_tokens_decoder()}


def _rename_older(config: dict[str, Any]) -> None:
    if "additional_special_tokens" in config:
        config["extra_special_tokens"] = config.pop("additional_special_tokens")


def _special(value: Any) -> Any:
    if isinstance(value, Mapping) and "content" in value:
        token = _added(value)
        token.special = True
        return token
    if isinstance(value, list):
        return [_special(item) for item in value]
    return value


def _named(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens with a name: the usual ones, then those that this model has besides."""
    own = {
        name: value
        for name, value in config.items()
        if name.endswith("_token") and name not in NAMED and isinstance(value, (str, AddedToken))
    }
    usual = {name: config[name] for name in NAMED if config.get(name) is not None}
    return {**usual, **own, **extra}


def _to_add(
    added: Mapping[int, AddedToken], named: Mapping[str, Any], extra: Iterable[Any], backend: Backend
) -> list[AddedToken | str]:
    """What to hand to the vocabulary, in the order in which new tokens get their ids."""
    names = {_content(token) for token in named.values()}
    listed = [_marked(token, names) for _, token in sorted(added.items(), key=lambda item: item[0])]
    known = {token.content for token in [*listed, *backend.get_added_tokens_decoder().values()]}
    return [*listed, *_unlisted([*named.values(), *extra], known)]


def _marked(token: AddedToken, names: set[str]) -> AddedToken:
    if token.content in names:
        token.special = True
    return token


def _unlisted(tokens: Iterable[Any], known: set[str]) -> Iterator[AddedToken]:
    for token in tokens:
        if _content(token) not in known:
            known.add(_content(token))
            yield token if isinstance(token, AddedToken) else AddedToken(_content(token), special=True)


# ------------------------------------------------------------------------------------------- templates


def _templates(directory: Path, configured: Any) -> Templates:
    """Templates in files of their own win over those of the configuration."""
    found = {path.stem: _text(path) for path in sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).is_file():
        found = {"default": _text(directory / TEMPLATE_FILE), **found}
    if found:
        return found["default"] if [*found] == ["default"] else found
    if configured is None:
        configured = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(configured, list):
        return {str(each["name"]): str(each["template"]) for each in configured}
    if configured is None or isinstance(configured, str):
        return configured
    return {str(name): str(template) for name, template in dict(configured).items()}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
