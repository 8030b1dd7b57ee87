"""`Tokenizer` converts text to token ids and back, and `get_tokenizer` loads that of a model.

The library `tokenizers` does the work; this module adds the special tokens, the chat templates and the
settings from the files beside a vocabulary. It encodes, decodes and renders chats. What `transformers` does
beyond that (padding, truncation, pairs, tensors, saving, older file formats) is left to
`get_tokenizer(backend="transformers")`. Any thread may use a tokenizer, also in a forked child.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, overload

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from tinker_sync._base.clock import make_lock
from tinker_sync._base.left_out import OPTIONS_OF_TRANSFORMERS, refuse_arguments
from tinker_sync.data import hub
from tinker_sync.data.chat_template import ChatTemplate, choose_template, split_chats
from tinker_sync.data.hub import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE, TokenizerSource, resolve
from tinker_sync.errors import InvalidInputError, TokenizerError

if TYPE_CHECKING:
    from tinker_sync.data.chat_template import Message, Tool

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that any tokenizer may have, in the order of `special_tokens_map`."""

_UNBOUNDED: Final = int(1e30)
_LEGACY: Final = "special_tokens_map.json"
_MORE_TEMPLATES: Final = "additional_chat_templates"

_MOST: Final = 32
# Files larger than this are worth a call of `trim_malloc`: parsing smaller ones frees little memory.
_TRIM_BYTES: Final = 1_000_000


class Encoded(dict[str, Any]):
    """A dictionary of `input_ids` and `attention_mask`, also available as attributes.

    >>> Encoded(input_ids=[5, 6]).input_ids
    [5, 6]
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} here, only {', '.join(self)}", name=name, obj=self) from None


class Tokenizer:
    """A converter of text to the token ids of a model and back. Threads may share it, also after a fork.
    The results equal those of `transformers` for the same files. `get_tokenizer` of a client returns the
    tokenizer of its model, and `from_directory` reads one from files:

    >>> from tokenizers import Tokenizer as Backend, models
    >>> tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")))
    >>> tokenizer.encode("a"), tokenizer.decode([0, 1]), len(tokenizer)
    ([0], 'a b', 3)

    The special tokens are attributes, each with its id. They may be set to other tokens of the vocabulary, or
    to None. Tokens that only some models have, such as `image_token`, are attributes as well:

    >>> tokenizer.eos_token = "b"
    >>> tokenizer.eos_token_id, tokenizer.pad_token, tokenizer.special_tokens_map
    (1, None, {'eos_token': 'b'})

    Args:
        backend: the tokenizer of the library, which this object owns from now on.
        config: the settings in `tokenizer_config.json`.
        name_or_path: the name of the model, or the directory.
    """

    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    unk_token: str | None
    unk_token_id: int | None
    sep_token: str | None
    sep_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None
    cls_token: str | None
    cls_token_id: int | None
    mask_token: str | None
    mask_token_id: int | None

    is_fast: Final = True

    def __init__(
        self, backend: Backend, config: Mapping[str, Any] | None = None, *, name_or_path: str = ""
    ) -> None:
        config = {name: _restore_tokens(value) for name, value in (config or {}).items()}
        if backend.padding is not None:
            config.setdefault("pad_token", backend.padding["pad_token"])
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        named = _collect_named(config, extra if isinstance(extra, Mapping) else {})
        unnamed = [] if isinstance(extra, Mapping) else [_token_text(token) for token in extra]
        # Threads share the backend, so its settings change only here, before the tokenizer is shared.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        if added := _list_added(config.get("added_tokens_decoder"), [*named.values(), *unnamed], backend):
            backend.add_tokens(added)
        self._backend = backend
        self._named = {name: _token_text(token) for name, token in named.items()}  # replaced as a whole
        self._extra = unnamed
        self.name_or_path = name_or_path
        self.chat_template = _read_listed_templates(config.get("chat_template"))
        self.model_max_length = int(min(config.get("model_max_length") or _UNBOUNDED, _UNBOUNDED))
        # The clean-up is made for vocabularies of words. With byte pairs it would remove spaces of the text.
        for_bytes = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        harmless = config.get(for_bytes, False) or type(backend.model).__name__ != "BPE"
        self.clean_up_tokenization_spaces = bool(
            config.get("clean_up_tokenization_spaces", False) and harmless
        )

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str], *, name_or_path: str = "") -> Tokenizer:
        """Load the tokenizer from a directory with `tokenizer.json`, its configuration and chat template.

        Raises:
            TokenizerError: there is no tokenizer, it cannot be read, or its special tokens are in a file of
                an older format.
        """
        path = Path(directory)
        try:
            backend = Backend.from_file(str(path / TOKENIZER_FILE))
        except Exception as error:  # the library raises the bare class
            reason = f"{path / TOKENIZER_FILE} cannot be read: {error}"
            raise TokenizerError(reason, name_or_path or str(path)) from error
        config = _read_json(path / CONFIG_FILE)
        templates = _read_templates(path)
        # A configuration that lists its added tokens is complete; the other file then repeats it.
        legacy = {} if "added_tokens_decoder" in config else _read_json(path / _LEGACY)
        older = [name for name in NAMED if name in legacy and name not in config]
        if older:
            raise TokenizerError(
                f"{path / _LEGACY} names {', '.join(older)}, which {CONFIG_FILE} does not; name them there, "
                "or use get_tokenizer(backend='transformers'), which reads older formats",
                name_or_path or str(path),
            )
        try:
            return cls(
                backend,
                {**config, **({"chat_template": templates} if templates else {})},
                name_or_path=name_or_path or str(path),
            )
        except TokenizerError:
            raise
        except Exception as error:  # a malformed value can raise any class
            reason = f"{path}: a malformed value in {CONFIG_FILE}; correct the value"
            raise TokenizerError(f"{reason} ({type(error).__name__}: {error})") from error

    # -------------------------------------------------------------------------------------- encoding

    def encode(self, text: Any, *, add_special_tokens: bool = True, **removed: Any) -> Any:
        """Return the token ids of a text as a list, or those of several texts as a list of lists.

        Args:
            text: one text, or a list of them.
            add_special_tokens: add the special tokens that frame every text.

        Raises:
            InvalidInputError: the argument is not a text.
            TypeError: an option that `transformers` alone has, such as `return_tensors`.
        """
        _refuse_removed("encode", removed)
        made = self._encode_all(text, add_special_tokens)
        return made[0].ids if isinstance(text, str) else [each.ids for each in made]

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        **removed: Any,
    ) -> Encoded:
        """Encode one text or several, and return `input_ids` and `attention_mask`.

        Args:
            text: one text, or a list of them.
            add_special_tokens: add the special tokens that frame every text.
            return_offsets_mapping: add `offset_mapping`, where each token begins and ends in the text.

        Raises:
            InvalidInputError: the argument is not a text.
            TypeError: an option that `transformers` alone has, such as `padding`.

        >>> get_tokenizer("tinker-sync/tiny")("2 + 3")
        {'input_ids': [20, 223, 13, 223, 21], 'attention_mask': [1, 1, 1, 1, 1]}
        """
        _refuse_removed("__call__", removed)
        made = self._encode_all(text, add_special_tokens)
        columns: dict[str, list[Any]] = {
            "input_ids": [each.ids for each in made],
            "attention_mask": [each.attention_mask for each in made],
        }
        if return_offsets_mapping:
            columns["offset_mapping"] = [each.offsets for each in made]
        return Encoded(
            {name: rows[0] for name, rows in columns.items()} if isinstance(text, str) else columns
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as the vocabulary spells them."""
        return self._encode_all(text, add_special_tokens)[0].tokens

    def _encode_all(self, text: str | Sequence[str], add_special_tokens: bool) -> list[Encoding]:
        given = cast("Any", text)
        if isinstance(given, (bytes, bytearray)):
            raise InvalidInputError(f"text: expected a str, got {type(given).__name__}; give text.decode()")
        if not isinstance(text, Iterable):
            raise InvalidInputError(f"text: expected a str or a list of them, got {type(given).__name__}")
        texts = [text] if isinstance(text, str) else list(text)
        try:
            if len(texts) == 1 or _forked:
                # In a forked child the library's worker threads are gone, and a batch could wait for them.
                return [self._backend.encode(each, add_special_tokens=add_special_tokens) for each in texts]
            return self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInputError(_describe_bad_text(texts, error)) from error

    # -------------------------------------------------------------------------------------- decoding

    @overload
    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> str: ...
    @overload
    def decode(
        self,
        token_ids: Sequence[Sequence[int]],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> list[str]: ...
    @overload
    def decode(
        self, token_ids: Any, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool | None = ...
    ) -> Any: ...
    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Return the text of token ids, or a list of texts for rows of ids.

        Args:
            token_ids: an id, a list, range, numpy array or torch tensor of ids, or rows of them.
            skip_special_tokens: leave special tokens out.
            clean_up_tokenization_spaces: remove spaces before punctuation; None follows the model's files.

        Raises:
            InvalidInputError: an id is negative, 2**32 or more, or not an integer. Unknown ids add no text.
        """
        ids = _as_ids(token_ids)
        if isinstance(ids, int):
            ids = [ids]
        if ids and isinstance(ids[0], (list, tuple)):
            return [self._decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in ids]
        return self._decode(ids, skip_special_tokens, clean_up_tokenization_spaces)

    def batch_decode(
        self,
        sequences: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """Return the texts of several rows of ids. The arguments are those of `decode`."""
        rows = ([row] if isinstance(row, int) else row for row in _as_ids(sequences))
        return [self._decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in rows]

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool, clean_up: bool | None) -> str:
        try:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidInputError(f"decode: expected token ids of 0 or more ({error})") from error
        clean_up = self.clean_up_tokenization_spaces if clean_up is None else clean_up
        return self.clean_up_tokenization(text) if clean_up else text

    @staticmethod
    def clean_up_tokenization(text: str) -> str:
        """Remove the spaces that decoding by words leaves before punctuation and English endings.

        >>> Tokenizer.clean_up_tokenization("it 's done .")
        "it's done."
        """
        for found in _TIDIER:
            text = text.replace(found, found.replace(" ", ""))
        return text

    # -------------------------------------------------------------------------------------- vocabulary

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Return the id of a token, or of each token in a list.
        For an unknown token, return the id of `unk_token`, or None if the model has no such token.
        """
        if isinstance(tokens, str):
            index = self._backend.token_to_id(tokens)
            return self.unk_token_id if index is None else index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> list[str | None]: ...
    def convert_ids_to_tokens(
        self, ids: Any, skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """Return the token of an id, or of each id in a list, as the vocabulary spells it; None if unknown.
        `skip_special_tokens` omits special tokens from a list. Negative ids raise `InvalidInputError`.
        """
        plain = _as_ids(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        try:
            if isinstance(plain, int):
                return self._backend.id_to_token(plain)
            return [self._backend.id_to_token(index) for index in plain if index not in skipped]
        except (TypeError, OverflowError) as error:
            raise InvalidInputError(f"expected token ids of 0 or more ({error})") from error

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens, decoded like that of ids, but without any clean-up of spaces."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    @property
    def backend_tokenizer(self) -> Backend:
        """The library's tokenizer. Threads share it, so do not change its settings."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Return every token and its id, in a new dictionary."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens added to the vocabulary, by id."""
        return self._backend.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of tokens added to the vocabulary."""
        return {token.content: index for index, token in sorted(self.added_tokens_decoder.items())}

    # -------------------------------------------------------------------------------------- special tokens

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

    def __getattr__(self, name: str) -> Any:
        token = name.removesuffix("_id")
        named: Mapping[str, str] = self.__dict__.get("_named", {})
        if token not in named and token not in NAMED:
            raise AttributeError(
                f"Tokenizer has no attribute {name!r}; get_tokenizer(backend='transformers') returns an "
                "object with all those of transformers",
                name=name,
                obj=self,
            )
        text = named.get(token)
        return text if name == token or text is None else self._backend.token_to_id(text)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.endswith(("_token", "_token_id")):
            object.__setattr__(self, name, value)
            return
        token = None if value is None else str(value)
        if value is not None and name.endswith("_id"):
            token = self._backend.id_to_token(value)
        # The vocabulary of a model cannot grow.
        if value is not None and (token is None or self._backend.token_to_id(token) is None):
            raise InvalidInputError(f"{name}: {value!r} is not in the vocabulary, which is the model's")
        named: dict[str, str | None] = {**self._named, name.removesuffix("_id"): token}
        order = (*NAMED, *(other for other in named if other not in NAMED))
        self._named = {each: kept for each in order if (kept := named.get(each)) is not None}

    # -------------------------------------------------------------------------------------- chats

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Tool] | None = None) -> str:
        """Return the text of the template that `apply_chat_template` uses for these arguments.

        Args:
            chat_template: the name of a template of the model, or the text of a template. None chooses the
                model's own template; of several, it chooses `tool_use` for a chat with tools, else `default`.
            tools: the tools of the chat.

        Raises:
            InvalidInputError: the model has no template, or several without a default.
        """
        return choose_template(self.chat_template, chat_template, tools)

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        *,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Render a chat with the model's template, as token ids or as text. Needs the extra `chat`.

        Args:
            conversation: a list of messages, each a dictionary with `role` and `content`; or several lists.
            tools: JSON schemas of functions that the model may call.
            documents: texts the model may cite, for templates that support them.
            chat_template: another template, or the name of one of the model's.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: leave the last message open, for the model to continue.
            tokenize: return ids; False returns the text.
            return_dict: return `input_ids` and `attention_mask` by name; False returns the ids alone.
            variables: further variables of the template.

        Raises:
            InvalidInputError: there is no template, or it refuses the chat.
            MissingExtraError: Jinja is not installed.
            TypeError: an option that `transformers` alone has, such as `padding`.
        """
        variables = _refuse_removed("apply_chat_template", variables)
        if not isinstance(continue_final_message, bool):
            raise InvalidInputError(
                f"continue_final_message: expected True or False, got {continue_final_message!r}"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidInputError("continue_final_message: goes without a generation prompt")
        template = ChatTemplate.of(self, chat_template, tools, documents, variables)
        chats, single = split_chats(conversation)
        texts = [
            template.render_open(chat)
            if continue_final_message
            else template.render(chat, prompt=add_generation_prompt)
            for chat in chats
        ]
        given = texts[0] if single else texts
        if not tokenize:
            return given
        made = self(given, add_special_tokens=False)
        return made if return_dict else made["input_ids"]

    def __repr__(self) -> str:
        return f"<Tokenizer {self.name_or_path or type(self._backend.model).__name__}, {len(self)} tokens>"


_TIDIER: Final = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def _refuse_removed(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse the options of `transformers` that ask for something, and return the other arguments.

    None and False ask for nothing, and scripts that write them out run unchanged.
    """
    refuse_arguments("Tokenizer", [name for name, value in given.items() if value not in (None, False)])
    others = {name: value for name, value in given.items() if name not in OPTIONS_OF_TRANSFORMERS}
    if others and method != "apply_chat_template":  # there they are variables of the template
        raise TypeError(f"Tokenizer.{method}() got an unexpected keyword argument {next(iter(others))!r}")
    return others


def _as_ids(given: Any) -> Any:
    """Return token ids as Python's ints: one int, a list or tuple of ints, or a list of rows of ints.

    The given ids are an int, list, tuple, range, array or tensor, or a dict with one of these as "input_ids".
    """
    if isinstance(given, dict):
        given = given["input_ids"]
    if hasattr(given, "tolist"):  # arrays, tensors and their single values
        return given.tolist()
    if isinstance(given, (list, tuple)):
        first = given[0] if given else 0
        return given if type(first) is int else [_as_ids(item) for item in given]
    return list(given) if isinstance(given, Iterable) else given


def _describe_bad_text(given: Sequence[object], error: Exception) -> str:
    for index, text in enumerate(given):
        where = "text" if len(given) == 1 else f"text[{index}]"
        if not isinstance(text, str):
            return f"{where}: expected a str, got {type(text).__name__}"
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            return f"{where}[{broken.start}]: half of a surrogate pair is not a character"
    return f"text: {error}"


# ------------------------------------------------------------------------------------------- files


def _read_json(path: Path) -> dict[str, Any]:
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
    if isinstance(token, str):
        return token
    if not isinstance(token, (AddedToken, Mapping)):
        raise TokenizerError(f"{CONFIG_FILE}: expected a special token's text, got {token!r}")
    return _make_added(token).content


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
    listed: Mapping[str, Any] | None, special: Sequence[Any], backend: Backend
) -> list[AddedToken | str]:
    """Return the tokens to add to the vocabulary, in the order of their new ids."""
    decoder = backend.get_added_tokens_decoder()
    added = decoder if listed is None else {int(index): _make_added(each) for index, each in listed.items()}
    names = {_token_text(token) for token in special}
    known = {token.content for token in [*added.values(), *decoder.values()]}
    ordered = [token for _, token in sorted(added.items(), key=lambda item: item[0])]
    for token in ordered:
        token.special = token.special or token.content in names
    return [*ordered, *_list_missing(special, known)]


def _list_missing(tokens: Iterable[Any], known: set[str]) -> Iterator[AddedToken]:
    for token in tokens:
        if _token_text(token) not in known:
            known.add(_token_text(token))
            yield token if isinstance(token, AddedToken) else AddedToken(_token_text(token), special=True)


def _read_templates(directory: Path) -> str | dict[str, str] | None:
    """Read the templates in separate files, which override the configuration."""
    paths = {path.stem: path for path in sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).is_file():
        paths["default"] = directory / TEMPLATE_FILE
    found = {}
    for name, path in paths.items():
        try:
            found[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path} cannot be read as UTF-8: {error}") from error
    return found["default"] if [*found] == ["default"] else found or None


def _read_listed_templates(configured: Any) -> str | dict[str, str] | None:
    if configured is None or isinstance(configured, str):
        return configured
    if isinstance(configured, list):
        return {str(each["name"]): str(each["template"]) for each in configured}
    return {str(name): str(template) for name, template in dict(configured).items()}


# ------------------------------------------------------------------------------------------- loading

_lock = make_lock()
_kept: OrderedDict[tuple[TokenizerSource, str], Any] = OrderedDict()  # guarded by _lock; last used at its end
_loading: dict[tuple[TokenizerSource, str], Future[None]] = {}  # guarded by _lock
_forked = False


def _renew_after_fork() -> None:
    """Forget the lock and the loads of the parent's threads, which do not exist in the child."""
    global _lock, _forked
    _lock, _forked = make_lock(), True
    _loading.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


def find_only_tokenizer() -> Any:
    """Return the one tokenizer that `get_tokenizer` keeps in memory; None if it keeps none or several."""
    with _lock:
        return next(iter(_kept.values())) if len(_kept) == 1 else None


@overload
def get_tokenizer(
    model_name: str, tokenizer_id: str | None = None, *, backend: Literal["tokenizers"] = "tokenizers"
) -> Tokenizer: ...
@overload
def get_tokenizer(
    model_name: str, tokenizer_id: str | None = None, *, backend: Literal["transformers"]
) -> Any: ...
def get_tokenizer(model_name: str, tokenizer_id: str | None = None, *, backend: str = "tokenizers") -> Any:
    """Return the tokenizer of a model, from a directory, from the hub's cache, or downloaded into it.

    If several threads want the same tokenizer, one loads it while the others wait. The last 32 stay in
    memory. Files in the cache are not compared with the hub's; `hf download` renews them. Tokenizers whose id
    begins with `TML/` or `thinkingmachines/` come from the vendor's package `tml_tokenizers`, if it has them.

    Args:
        model_name: the name of a model, or a directory with its `tokenizer.json`.
        tokenizer_id: the server's id of the model's tokenizer.
        backend: "transformers" returns an object of that library, which must be installed.

    Raises:
        TokenizerError: the tokenizer cannot be loaded; the text names the remedy.
        InvalidInputError: the backend has another name.

    >>> get_tokenizer("tinker-sync/tiny").encode("2 + 3 =")[:2]
    [20, 223]
    >>> get_tokenizer("/no/such/directory")
    Traceback (most recent call last):
    tinker_sync.errors.TokenizerError: the directory /no/such/directory does not exist; ...
    """
    if backend not in ("tokenizers", "transformers"):
        raise InvalidInputError(f"backend: expected 'tokenizers' or 'transformers', got {backend!r}")
    if not (tokenizer_id or model_name):
        raise TokenizerError("the server names neither a model nor a tokenizer")
    key = resolve(model_name, tokenizer_id), backend
    while True:
        mine: Future[None] = Future()
        # Ctrl-C may interrupt this block at any point, and the load must end in every case.
        try:
            with _lock:
                if key in _kept:
                    _kept.move_to_end(key)
                    return _kept[key]
                loading = _loading.setdefault(key, mine)
            if loading is mine:
                made = _load(*key)
                with _lock:
                    _kept[key] = made
                    while len(_kept) > _MOST:
                        _kept.popitem(last=False)
                _end_load(key, mine, None)
                return made
        except BaseException as failure:
            _end_load(key, mine, failure)
            raise
        # If Ctrl-C has interrupted the thread that was loading, one of those that waited takes over.
        ended = loading.exception()
        if isinstance(ended, Exception):
            raise ended


def _end_load(key: tuple[TokenizerSource, str], load: Future[None], failure: BaseException | None) -> None:
    with _lock:
        if _loading.get(key) is load:
            del _loading[key]
    if load.done():
        return
    if failure is None:
        load.set_result(None)
    else:
        load.set_exception(failure)


def _load(source: TokenizerSource, backend: str) -> Any:
    if source.is_vendor_tokenizer and not source.is_directory:
        made = _load_vendor(source)
        if made is not None:
            return made
    if backend == "transformers":
        return _load_transformers(source)
    directory = hub.find(source)
    tokenizer = Tokenizer.from_directory(directory, name_or_path=source.id)
    if (directory / TOKENIZER_FILE).stat().st_size > _TRIM_BYTES:
        trim_malloc()
    return tokenizer


def _load_transformers(source: TokenizerSource) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise TokenizerError("backend='transformers': pip install transformers", source.id) from error
    options = {"revision": source.revision} if source.revision else {}
    try:
        return transformers.AutoTokenizer.from_pretrained(
            source.id, use_fast=True, trust_remote_code=source.runs_code, **options
        )
    except (OSError, ValueError) as error:
        raise TokenizerError(f"transformers cannot load {source.id!r}: {error}", source.id) from error


def _load_vendor(source: TokenizerSource) -> Any:
    """Return the tokenizer of the vendor's package, or None if the package does not have this tokenizer.

    Raises:
        TokenizerError: the package is not installed.
    """
    try:
        vendor: Any = importlib.import_module("tml_tokenizers.tinker_tokenizers")
    except ImportError as error:
        raise TokenizerError(
            f"the tokenizer {source.id!r} comes with the vendor's package tml_tokenizers, which is not "
            "installed; tml-renderers builds prompts for these models",
            source.id,
        ) from error
    return vendor.get_tinker_tokenizer(source.id)


def trim_malloc() -> bool:
    """Give freed memory back to the system if the C library has a call for it, as glibc has.

    Return True if some memory was given back.

    Parsing a vocabulary takes several times the memory of the resulting tokenizer. Without this call, glibc
    would keep the freed memory, and the process would occupy about twice as much as it uses.
    """
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # only large tokenizers need it

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return False
    return bool(trim(0))
