"""`get_tokenizer`: loads the tokenizers of models, and keeps the last 32. Any thread may call it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar, overload

from tinker_sync.errors import InvalidInputError, TokenizerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.text import hub
from tinker_sync.text.hub import TokenizerSource, resolve
from tinker_sync.text.setup import read_json
from tinker_sync.text.tokenizer import Tokenizer

T = TypeVar("T")

_KEPT: Final = 32
# Files larger than this are worth a call of `trim_malloc`: parsing smaller ones frees little memory.
_TRIM_BYTES: Final = 1_000_000


class LoadedOnce(Generic[T]):
    """A cache that keeps the most recently used values. Thread-safe.

    If several threads want a missing value, one loads it and the others wait. They also get its failure.

    >>> loaded = LoadedOnce(2)
    >>> loaded.get("a", lambda: "first"), loaded.get("a", lambda: "second")
    ('first', 'first')
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        # guarded by _lock; the last used is at its end
        self._kept: OrderedDict[Hashable, Lazy[T]] = OrderedDict()
        _fork.renew_in_child(self)

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """Return the value of a key. Call `load` if the cache does not have it. A failure is not kept."""
        new: Lazy[T] = Lazy()
        with self._lock:
            lazy = self._kept.setdefault(key, new)
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return lazy.get(load)

    def values(self) -> list[T]:
        """Return the values that are loaded."""
        with self._lock:
            kept = list(self._kept.values())
        return [lazy.value for lazy in kept if lazy.value is not None]

    def renew_after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may hold."""
        self._lock = threading.Lock()


_loaded: Final[LoadedOnce[Any]] = LoadedOnce(_KEPT)


def find_only_tokenizer() -> Any:
    """Return the one tokenizer that `get_tokenizer` keeps in memory; None if it keeps none or several."""
    made = _loaded.values()
    return made[0] if len(made) == 1 else None


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
    source = resolve(model_name, tokenizer_id)
    return _loaded.get((source, backend), partial(_load, source, backend))


def _load(source: TokenizerSource, backend: str) -> Any:
    if source.is_vendor_tokenizer and not source.is_directory:
        made = _load_vendor(source)
        if made is not None:
            return made
    return _load_files(source) if backend == "tokenizers" else _load_transformers(source)


def _load_files(source: TokenizerSource) -> Tokenizer:
    place = hub.find(source)
    if "added_tokens_decoder" not in read_json(place.directory / hub.CONFIG_FILE):
        place = hub.complete(source, place, hub.LEGACY)
    made = Tokenizer.from_directory(place.directory, name_or_path=source.id)
    if (place.directory / hub.TOKENIZER_FILE).stat().st_size > _TRIM_BYTES:
        trim_malloc()
    return made


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
