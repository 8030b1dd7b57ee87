"""`get_tokenizer`: the tokenizer of a model, loaded once for the whole process."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Final, Literal, overload

from tinker_sync.errors import InvalidInputError, TokenizerError
from tinker_sync.text import hub, memory
from tinker_sync.text.cache import LoadedOnce
from tinker_sync.text.resolve import Source, resolve
from tinker_sync.text.setup import read_json
from tinker_sync.text.tokenizer import Tokenizer

_MOST: Final = 32
_loaded: Final[LoadedOnce[Any]] = LoadedOnce(_MOST)


@overload
def get_tokenizer(
    model_name: str, tokenizer_id: str | None = None, *, backend: Literal["tokenizers"] = "tokenizers"
) -> Tokenizer: ...
@overload
def get_tokenizer(
    model_name: str, tokenizer_id: str | None = None, *, backend: Literal["transformers"]
) -> Any: ...
def get_tokenizer(model_name: str, tokenizer_id: str | None = None, *, backend: str = "tokenizers") -> Any:
    """The tokenizer of a model: from a directory, from the hub's cache, or fetched into it.

    Each is loaded once in a process, by one thread while others wait; the last 32 are kept. Files that the
    cache has are not compared with the hub's; `hf download` renews them.

    Args:
        model_name: a model's name or a directory with its `tokenizer.json`.
        tokenizer_id: what the server says is the model's tokenizer.
        backend: "transformers" gives an object of that library, which has to be installed.

    Raises:
        TokenizerError: it is not to be had; the text says which files to put where.

    >>> get_tokenizer("/no/such/directory")
    Traceback (most recent call last):
    tinker_sync.errors.TokenizerError: the directory /no/such/directory does not exist; ...
    """
    if backend not in ("tokenizers", "transformers"):
        raise InvalidInputError(f"backend: expected 'tokenizers' or 'transformers', got {backend!r}")
    if not (tokenizer_id or model_name):
        raise TokenizerError("the server names neither a model nor a tokenizer")
    source = resolve(model_name, tokenizer_id)
    load = _load if backend == "tokenizers" else _load_transformers
    return _loaded.get((source, backend), partial(load, source))


def _load(source: Source) -> Any:
    if source.is_of_the_house and not source.is_directory:
        made = _of_the_house(source)
        if made is not None:
            return made
    place = hub.find(source)
    if "added_tokens_decoder" not in read_json(place.directory / hub.CONFIG_FILE):
        place = hub.complete(source, place, hub.LEGACY)
    made = Tokenizer.from_directory(place.directory, name_or_path=source.id)
    if (place.directory / hub.TOKENIZER_FILE).stat().st_size > memory.WORTH_IT_BYTES:
        memory.give_back()
    return made


def _load_transformers(source: Source) -> Any:
    if source.is_of_the_house and not source.is_directory:
        made = _of_the_house(source)
        if made is not None:
            return made
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


def _of_the_house(source: Source) -> Any:
    """What the vendor's package makes, None where it leaves the tokenizer to others."""
    try:
        theirs: Any = importlib.import_module("tml_tokenizers.tinker_tokenizers")
    except ImportError as error:
        raise TokenizerError(
            f"the tokenizer {source.id!r} comes with the vendor's package tml_tokenizers, which is not "
            "installed; tml-renderers builds prompts for these models",
            source.id,
        ) from error
    return theirs.get_tinker_tokenizer(source.id)
