"""Special tokens, chat templates and settings in the files beside a vocabulary: reading and writing them.

`SpecialTokens` has the special tokens as attributes, such as `eos_token` and `eos_token_id`.

The library `tokenizers` reads the vocabulary itself. Each load reads the other files once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from attrs import field, frozen
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tinker_sync.errors import InvalidInputError, TokenizerError
from tinker_sync.text.hub import CONFIG_FILE, LEGACY, TEMPLATE_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from tinker_sync.text.tokenizer import Tokenizer

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that any tokenizer may have, in the order of `special_tokens_map`."""

Templates = str | dict[str, str] | None
"""A chat template, several by name, or none."""

_MORE_TEMPLATES: Final = "additional_chat_templates"
_UNBOUNDED: Final = int(1e30)


@frozen
class Setup:
    """The properties of a tokenizer other than its vocabulary."""

    named: dict[str, str]
    """Special tokens by name, the common ones first."""
    extra: list[str]
    """Special tokens without a name."""
    added: list[AddedToken | str]
    """Tokens to add to the vocabulary, which may have some of them already."""
    templates: Templates
    model_max_length: int
    model_input_names: list[str]
    padding_side: str
    truncation_side: str
    clean_up_spaces: bool
    clean_up_bpe_too: bool
    split_special_tokens: bool
    config: dict[str, Any] = field(repr=False)
    """The configuration file, for `save`."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one when the file does not exist.

    Raises:
        TokenizerError: the file cannot be read, or has no JSON object.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got a {type(tree).__name__}")
    return tree


def read_setup(directory: Path | None, backend: Backend) -> Setup:
    """Return the setup in the files of a directory, or the default setup if there is no directory.

    Raises:
        TokenizerError: a file cannot be read, or has a malformed value.
    """
    try:
        return _read_setup(directory, backend)
    except TokenizerError:
        raise
    except Exception as error:  # a malformed value can raise any class
        reason = f"{directory}: a malformed value in {CONFIG_FILE} or in a file beside it; correct the value"
        raise TokenizerError(f"{reason} ({type(error).__name__}: {error})") from error


def _read_setup(directory: Path | None, backend: Backend) -> Setup:
    original = {} if directory is None else read_json(directory / CONFIG_FILE)
    config = {name: _restore_tokens(value) for name, value in original.items()}
    if not config.get("extra_special_tokens"):
        _rename_legacy(config)
    listed = config.get("added_tokens_decoder")
    if listed is None:
        added = _merge_legacy(directory, backend, config)
    else:
        added = {int(index): _make_added(token) for index, token in listed.items()}
    if backend.padding is not None:
        config.setdefault("pad_token", backend.padding["pad_token"])
        config.setdefault("padding_side", backend.padding["direction"])
    extra = config.get("extra_special_tokens") or []
    named = _collect_named(config, extra if isinstance(extra, Mapping) else {})
    unnamed = [] if isinstance(extra, Mapping) else list(extra)
    return Setup(
        named={name: str(_token_text(token)) for name, token in named.items()},
        extra=[str(_token_text(token)) for token in unnamed],
        added=_list_added(added, named, unnamed, backend),
        templates=None if directory is None else _read_templates(directory, config.get("chat_template")),
        model_max_length=int(
            min(config.get("model_max_length") or config.get("max_len") or _UNBOUNDED, _UNBOUNDED)
        ),
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


def _restore_tokens(value: Any) -> Any:
    """Return a copy of a JSON value in which `AddedToken` objects replace saved tokens, at any depth."""
    if isinstance(value, dict):
        if value.get("__type") == "AddedToken":
            return _make_added(value)
        return {name: _restore_tokens(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restore_tokens(item) for item in value]
    return value


def _make_added(token: Any) -> AddedToken:
    if isinstance(token, AddedToken):
        return token
    if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
        raise TokenizerError(f"{CONFIG_FILE}: expected an added token, got {token!r}")
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(**{name: token[name] for name in known if name in token})


def _token_text(token: Any) -> str:
    """Return the text of a token, which is a str, an `AddedToken`, or a mapping with `content`."""
    if isinstance(token, AddedToken):
        return token.content
    if isinstance(token, Mapping):
        return _make_added(token).content
    if not isinstance(token, str):
        raise TokenizerError(f"{CONFIG_FILE}: expected a special token's text, got {token!r}")
    return token


def _merge_legacy(directory: Path | None, backend: Backend, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens by id, from the legacy files and the vocabulary.

    This function is for configurations that list no added tokens. It writes the special tokens of
    `special_tokens_map.json` into `config`. They replace those of `config`, but extend its list
    `extra_special_tokens`.
    """
    named, ids = ({}, {}) if directory is None else (read_json(directory / name) for name in LEGACY)
    for name, value in named.items():
        if name == "extra_special_tokens" and isinstance(value, list):
            known = [_token_text(token) for token in config.get(name) or []]
            new = [_as_special(token) for token in value if _token_text(token) not in known]
            config[name] = [*(config.get(name) or []), *new]
        else:
            config[name] = _as_special(value)
    special = {_token_text(config[name]) for name in NAMED if config.get(name)}
    extra = config.get("extra_special_tokens") or []
    special |= {_token_text(token) for token in (extra.values() if isinstance(extra, Mapping) else extra)}
    added = {
        int(index): AddedToken(text, normalized=text not in special, special=text in special)
        for text, index in ids.items()
    }
    if "extra_special_tokens" not in config:
        _rename_legacy(config)
    return {**added, **backend.get_added_tokens_decoder()}


def _rename_legacy(config: dict[str, Any]) -> None:
    if "additional_special_tokens" in config:
        config["extra_special_tokens"] = config.pop("additional_special_tokens")


def _as_special(value: Any) -> Any:
    if isinstance(value, Mapping) and "content" in value:
        token = _make_added(value)
        token.special = True
        return token
    if isinstance(value, list):
        return [_as_special(item) for item in value]
    return value


def _collect_named(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens by name: the common names first, then names that only this model has."""
    own = {
        name: value
        for name, value in config.items()
        if name.endswith("_token") and name not in NAMED and isinstance(value, (str, AddedToken))
    }
    usual = {name: config[name] for name in NAMED if config.get(name) is not None}
    return {**usual, **own, **extra}


def _list_added(
    added: Mapping[int, AddedToken], named: Mapping[str, Any], extra: Iterable[Any], backend: Backend
) -> list[AddedToken | str]:
    """Return the tokens to add to the vocabulary, in the order of their new ids."""
    names = {_token_text(token) for token in named.values()}
    listed = [_mark_special(token, names) for _, token in sorted(added.items(), key=lambda item: item[0])]
    known = {token.content for token in [*listed, *backend.get_added_tokens_decoder().values()]}
    return [*listed, *_list_missing([*named.values(), *extra], known)]


def _mark_special(token: AddedToken, names: set[str]) -> AddedToken:
    if token.content in names:
        token.special = True
    return token


def _list_missing(tokens: Iterable[Any], known: set[str]) -> Iterator[AddedToken]:
    for token in tokens:
        if _token_text(token) not in known:
            known.add(_token_text(token))
            yield token if isinstance(token, AddedToken) else AddedToken(_token_text(token), special=True)


# ------------------------------------------------------------------------------------------- templates


def _read_templates(directory: Path, configured: Any) -> Templates:
    """Read the templates. Those in separate files override the configuration."""
    found = {path.stem: _read_text(path) for path in sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).is_file():
        found = {"default": _read_text(directory / TEMPLATE_FILE), **found}
    if found:
        return found["default"] if [*found] == ["default"] else found
    if configured is None:
        configured = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(configured, list):
        return {str(each["name"]): str(each["template"]) for each in configured}
    if configured is None or isinstance(configured, str):
        return configured
    return {str(name): str(template) for name, template in dict(configured).items()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as UTF-8: {error}") from error


# ------------------------------------------------------------------------------------------- saving


def save(
    directory: Path, backend: Backend, config: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Create a directory, write all files of a tokenizer into it, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / TOKENIZER_FILE, directory / CONFIG_FILE]
    backend.save(str(paths[0]))
    text = json.dumps(_config_to_save(config, tokenizer), indent=2, ensure_ascii=False)
    paths[1].write_text(text + "\n", encoding="utf-8")
    for place, template in _templates_to_save(tokenizer):
        (directory / place).parent.mkdir(exist_ok=True)
        (directory / place).write_text(template, encoding="utf-8")
        paths.append(directory / place)
    return tuple(map(str, paths))


def _config_to_save(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the configuration with the present settings of the tokenizer.

    Added tokens and chat templates are left out, because other files have them.
    """
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


def _templates_to_save(tokenizer: Tokenizer) -> list[tuple[str, str]]:
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


class _TokenAttribute:
    """The descriptor of an attribute such as `eos_token`: the text of a special token, or None.

    The user may set the attribute to another token of the vocabulary, or to None.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, tokenizer: None, owner: type) -> _TokenAttribute: ...
    @overload
    def __get__(self, tokenizer: SpecialTokens, owner: type) -> str | None: ...
    def __get__(self, tokenizer: SpecialTokens | None, owner: type) -> _TokenAttribute | str | None:
        return self if tokenizer is None else tokenizer.special_tokens_map.get(self._name)

    def __set__(self, tokenizer: SpecialTokens, token: str | AddedToken | None) -> None:
        tokenizer.name_special_token(self._name, None if token is None else str(token))


class _IdAttribute:
    """The descriptor of an attribute such as `eos_token_id`: the id of a special token, or None.

    The user may set the attribute to the id of another token of the vocabulary, or to None.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removesuffix("_id")

    @overload
    def __get__(self, tokenizer: None, owner: type) -> _IdAttribute: ...
    @overload
    def __get__(self, tokenizer: SpecialTokens, owner: type) -> int | None: ...
    def __get__(self, tokenizer: SpecialTokens | None, owner: type) -> _IdAttribute | int | None:
        if tokenizer is None:
            return self
        token = tokenizer.special_tokens_map.get(self._name)
        return None if token is None else tokenizer.backend_tokenizer.token_to_id(token)

    def __set__(self, tokenizer: SpecialTokens, index: int | None) -> None:
        token = None if index is None else tokenizer.backend_tokenizer.id_to_token(index)
        if index is not None and token is None:
            raise InvalidInputError(f"{self._name}_id: {index} is not in the vocabulary")
        tokenizer.name_special_token(self._name, token)


class SpecialTokens:
    """The base class of `Tokenizer`, with the special tokens of the vocabulary as attributes. Thread-safe."""

    bos_token, bos_token_id = _TokenAttribute(), _IdAttribute()
    eos_token, eos_token_id = _TokenAttribute(), _IdAttribute()
    unk_token, unk_token_id = _TokenAttribute(), _IdAttribute()
    sep_token, sep_token_id = _TokenAttribute(), _IdAttribute()
    pad_token, pad_token_id = _TokenAttribute(), _IdAttribute()
    cls_token, cls_token_id = _TokenAttribute(), _IdAttribute()
    mask_token, mask_token_id = _TokenAttribute(), _IdAttribute()
    pad_token_type_id: Final = 0

    def __init__(self, backend: Backend, named: Mapping[str, str], extra: list[str]) -> None:
        self._backend = backend
        self._named = named  # replaced as a whole, never modified
        self._extra = extra

    @property
    def backend_tokenizer(self) -> Backend:
        """The library's tokenizer. Threads share it, so do not change its settings."""
        return self._backend

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by name, the common ones first."""
        return dict(self._named)

    @property
    def extra_special_tokens(self) -> list[str]:
        """Special tokens without a name."""
        return list(self._extra)

    additional_special_tokens = extra_special_tokens

    @property
    def all_special_tokens(self) -> list[str]:
        """Every special token once."""
        return list(dict.fromkeys([*self._named.values(), *self._extra]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        ids = map(self._backend.token_to_id, self.all_special_tokens)
        return [index for index in ids if index is not None]

    def name_special_token(self, name: str, token: str | None) -> None:
        """Give a token of the vocabulary a name such as "pad_token". None removes the name.

        Raises:
            InvalidInputError: the token is not in the vocabulary. The vocabulary of a model cannot grow.
        """
        if token is not None and self._backend.token_to_id(token) is None:
            raise InvalidInputError(f"{name}: {token!r} is not in the vocabulary, which is the model's")
        named: dict[str, str | None] = {**self._named, name: token}
        order = (*NAMED, *(other for other in named if other not in NAMED))
        self._named = {each: kept for each in order if (kept := named.get(each)) is not None}

    def __getattr__(self, name: str) -> Any:
        """Return a special token that only some models have, or its id: `image_token` or `image_token_id`."""
        named: Mapping[str, str] = self.__dict__.get("_named", {})
        if name in named:
            return named[name]
        if name.endswith("_id") and name[:-3] in named:
            return self._backend.token_to_id(named[name[:-3]])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
