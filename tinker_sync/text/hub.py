"""The files of a model's tokenizer: choice of their source by the model's name, search and download.

The files are in a directory or in the hub's cache. This module reads the cache directly, without network and
without loading a library. The hub's own library, which comes with `tokenizers`, downloads what the cache
lacks: it knows the host, tokens, proxies, locks between processes and the cache's layout. Any thread may call
this module.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from tinker_sync.errors import TokenizerError

_log = logging.getLogger(__name__)

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
WANTED: Final = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)
"""Files that every load uses, where they exist."""
LEGACY: Final = ("special_tokens_map.json", "added_tokens.json")
"""Files that older repositories use in place of a list of added tokens in the configuration."""

_REPOSITORY: Final = re.compile(r"[\w.-]+(?:/[\w.-]+)?", re.ASCII)
_TRUE: Final = {"1", "ON", "YES", "TRUE"}
_DEFAULT_REVISION: Final = "main"

LLAMA_3: Final = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The open copy of a tokenizer whose own repositories require a licence."""

_PINNED: Final = {
    "moonshotai/Kimi-K2-Thinking": (
        "moonshotai/Kimi-K2-Thinking",
        "612681931a8c906ddb349f8ad0f582cb552189cd",
    ),
    "moonshotai/Kimi-K2.5-Text-Only": ("moonshotai/Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611"),
    "moonshotai/Kimi-K2.5": ("moonshotai/Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611"),
    "moonshotai/Kimi-K2.6": ("moonshotai/Kimi-K2.6", "b5aabbfb20227ed42becbf5541dbffd213942c58"),
    "moonshotai/Kimi-K3": ("moonshotai/Kimi-K3", "f831ab66814297da540d832a5235f8e904f29d06"),
}
_BUILT_IN: Final = "tinker-sync/tiny"
_BUILT_IN_FILES: Final = Path(__file__).parents[1] / "local" / "tiny" / "files"
_VENDOR_PREFIXES: Final = ("TML/", "thinkingmachines/")


@frozen
class TokenizerSource:
    """The source of a tokenizer: a repository's id and revision, or a directory.

    `runs_code` is True if code of the repository builds the tokenizer. The revision of such a repository is
    fixed in this package.
    """

    id: str
    revision: str | None = None
    runs_code: bool = False

    @property
    def is_directory(self) -> bool:
        """True when the id is a directory on this machine rather than a repository."""
        return looks_like_path(self.id) or os.path.isdir(self.id)

    @property
    def is_vendor_tokenizer(self) -> bool:
        """True when the vendor's package builds this tokenizer."""
        return self.id.startswith(_VENDOR_PREFIXES)


def looks_like_path(name: str) -> bool:
    """Return True when a name can only be a path on this machine.

    >>> looks_like_path("/models/mine"), looks_like_path("org/model")
    (True, False)
    """
    return os.path.isabs(name) or name.startswith(("./", "../", "~", ".\\", "..\\"))


def resolve(model_name: str, tokenizer_id: str | None = None) -> TokenizerSource:
    """Return the source of a model's tokenizer: by the server's tokenizer id, else by the model's name.

    Args:
        model_name: such as `org/model`, `org/model:variant`, `org/model/variant` or a directory.
        tokenizer_id: the server's id of the tokenizer, if it gave one.

    >>> resolve("org/model/variant:fast").id, resolve("any", "org/other:8").id
    ('org/model', 'org/other')
    >>> resolve("tinker-sync/tiny").is_directory  # the model in this package
    True
    """
    given = tokenizer_id or model_name
    if given == _BUILT_IN:
        given = os.fspath(_BUILT_IN_FILES)
    if looks_like_path(given) or os.path.isdir(given):
        return TokenizerSource(os.path.realpath(os.path.expanduser(given)))
    name = given.partition(":")[0]
    if not tokenizer_id:
        name = _by_family(name)
    pinned = _PINNED.get(name)
    return TokenizerSource(name) if pinned is None else TokenizerSource(*pinned, runs_code=True)


def _by_family(model_name: str) -> str:
    if model_name.startswith("meta-llama/Llama-3"):
        return LLAMA_3
    if model_name.count("/") == 2:
        return model_name.rpartition("/")[0]
    return model_name


@frozen
class TokenizerFiles:
    """The directory with a tokenizer's files, and the record of files that the hub does not have."""

    directory: Path
    absent: Path | None = None
    """A directory with an empty file for each file known not to exist on the hub; None without a hub."""

    def has(self, name: str) -> bool:
        return (self.directory / name).is_file()

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Return the names that are neither in the directory nor recorded as absent; [] without a hub."""
        if self.absent is None:
            return []
        return [name for name in names if not self.has(name) and not (self.absent / name).exists()]


def find(source: TokenizerSource) -> TokenizerFiles:
    """Find the files of a tokenizer, and download what the cache lacks.

    Raises:
        TokenizerError: there is no such tokenizer; the text names the place searched and the remedy.
    """
    if source.is_directory:
        return _in_directory(source)
    if not _REPOSITORY.fullmatch(source.id) or ".." in source.id:
        raise TokenizerError(f"{source.id!r} is neither a directory nor the id of a repository", source.id)
    return complete(source, find_cached(source), WANTED)


def _in_directory(source: TokenizerSource) -> TokenizerFiles:
    place = TokenizerFiles(Path(source.id))
    if place.has(TOKENIZER_FILE):
        return place
    what = f"has no {TOKENIZER_FILE}" if place.directory.is_dir() else "does not exist"
    raise TokenizerError(
        f"the directory {source.id} {what}; put the model's {TOKENIZER_FILE} and {CONFIG_FILE} there",
        source.id,
    )


# ------------------------------------------------------------------------------------------- the hub's cache


def cache_directory() -> Path:
    """Return the cache directory of the hub's library, from the environment variables of the library."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return _expand(os.environ[name])
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return _expand(home) / "hub"


def _expand(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


def is_offline() -> bool:
    """Return True when an environment variable forbids the hub's library to use the network."""
    return any(
        os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def find_cached(source: TokenizerSource) -> TokenizerFiles | None:
    """Return the cached files of a repository's revision, or None if `tokenizer.json` is not among them."""
    root = cache_directory() / ("models--" + source.id.replace("/", "--"))
    commit = revision = source.revision or _DEFAULT_REVISION
    with suppress(OSError):  # without a ref the revision is itself a commit, or not in the cache
        commit = (root / "refs" / revision).read_text(encoding="utf-8").strip()
    place = TokenizerFiles(root / "snapshots" / commit, root / ".no_exist" / commit)
    return place if place.has(TOKENIZER_FILE) else None


# ------------------------------------------------------------------------------------------- the network


def complete(source: TokenizerSource, place: TokenizerFiles | None, names: Sequence[str]) -> TokenizerFiles:
    """Download those of the named files that are missing and that the hub has; return the tokenizer's files.

    `place` has the cached files; it is None if the cache has no `tokenizer.json`. If the network fails or is
    forbidden, return `place` as it is.

    Raises:
        TokenizerError: the hub has no such tokenizer, or the network is necessary and fails or is forbidden.
    """
    missing = names if place is None else place.unknown(names)
    if place is not None and (not missing or is_offline()):
        return place
    if is_offline():
        raise TokenizerError(_explain_missing(source, "HF_HUB_OFFLINE is set"), source.id)
    try:
        for name in missing:
            _fetch(source, name)
    except _NotOnHubError as error:
        raise TokenizerError(_explain_unusable(source, str(error)), source.id) from error.__cause__
    except Exception as error:
        if place is None:
            raise TokenizerError(_explain_missing(source, _first_line(error)), source.id) from error
        _log.warning(
            "%s: cannot check the hub for %s (%s); using the files in the cache",
            *(source.id, ", ".join(place.unknown(names)), _first_line(error)),
        )
        return place
    found = find_cached(source)
    if found is None:
        raise TokenizerError(
            _explain_missing(source, "the hub's library keeps its files elsewhere"), source.id
        )
    return found


class _NotOnHubError(Exception):
    """The error for a repository, revision or file that the hub does not have, or hides from this user."""


def _fetch(source: TokenizerSource, name: str) -> None:
    """Let the hub's library download one file into the cache, or record there that the file does not exist.

    Raises:
        _NotOnHubError: the hub does not have the repository or the revision, or this is `tokenizer.json`.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.utils")
    try:
        hub.hf_hub_download(source.id, name, revision=source.revision)
    except errors.LocalEntryNotFoundError:
        raise  # without network it is unknown if the file exists
    except errors.EntryNotFoundError as error:
        if name == TOKENIZER_FILE:
            raise _NotOnHubError(f"it has no {TOKENIZER_FILE}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise _NotOnHubError(_first_line(error)) from error


def _explain_missing(source: TokenizerSource, why: str) -> str:
    revision = f" --revision {source.revision}" if source.revision else ""
    where = cache_directory()
    return (
        f"the tokenizer {source.id!r} is not in {where} and could not be fetched ({why}). On a machine with "
        f"network run `hf download {source.id} {TOKENIZER_FILE} {CONFIG_FILE} {TEMPLATE_FILE}{revision}` and "
        f"copy its cache to {where}, or put these files into a directory and give its path instead."
    )


def _explain_unusable(source: TokenizerSource, why: str) -> str:
    advice = (
        "Code of the repository builds its tokenizer; get_tokenizer(backend='transformers') runs it."
        if source.runs_code
        else "get_tokenizer(backend='transformers') reads older formats; HF_TOKEN opens private repositories."
    )
    return f"the repository {source.id!r} cannot be used: {why}. {advice}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
