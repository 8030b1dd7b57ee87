"""Where the files of a model's tokenizer are: a directory, the hub's cache, or the hub.

This module reads the cache itself, because importing the hub's library takes longer than importing this
package. The library, which comes with `tokenizers`, downloads what the cache lacks, since it knows the host,
credentials, proxies, locks between processes and the cache's layout. Any thread may call this module.
"""

from __future__ import annotations

import importlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from tinker_sync._base.log import Log
from tinker_sync.errors import TokenizerError

_log = Log(__name__)

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
WANTED: Final = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)

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


def find(source: TokenizerSource) -> Path:
    """Return the directory with the files of a tokenizer, and download what the cache lacks.

    If the cache has a `tokenizer.json` and the network fails or is forbidden, the cached files are used as
    they are.

    Raises:
        TokenizerError: there is no such tokenizer; the text names the place searched and the remedy.
    """
    if source.is_directory:
        return _check_directory(source)
    if not _REPOSITORY.fullmatch(source.id) or ".." in source.id:
        raise TokenizerError(f"{source.id!r} is neither a directory nor the id of a repository", source.id)
    cached = _find_cached(source)
    missing = WANTED if cached is None else cached.missing()
    if cached is not None and (not missing or is_offline()):
        return cached.directory
    if is_offline():
        raise TokenizerError(_explain_missing(source, "HF_HUB_OFFLINE is set"), source.id)
    try:
        for name in missing:
            _fetch(source, name)
    except _NotOnHubError as error:
        raise TokenizerError(_explain_unusable(source, str(error)), source.id) from error.__cause__
    except Exception as error:
        if cached is None:
            raise TokenizerError(_explain_missing(source, _first_line(error)), source.id) from error
        _log.warning(
            "%s: cannot check the hub for %s (%s); using the files in the cache",
            *(source.id, ", ".join(cached.missing()), _first_line(error)),
        )
        return cached.directory
    found = _find_cached(source)
    if found is None:
        why = "the hub's library keeps its files elsewhere"
        raise TokenizerError(_explain_missing(source, why), source.id)
    return found.directory


def _check_directory(source: TokenizerSource) -> Path:
    directory = Path(source.id)
    if (directory / TOKENIZER_FILE).is_file():
        return directory
    what = f"has no {TOKENIZER_FILE}" if directory.is_dir() else "does not exist"
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


@frozen
class _Cached:
    """A snapshot in the hub's cache, and the directory that records what the hub lacks by empty files."""

    directory: Path
    absent: Path

    def missing(self) -> list[str]:
        """Return the wanted files that are neither here nor known to be absent from the hub."""
        return [
            name
            for name in WANTED
            if not (self.directory / name).is_file() and not (self.absent / name).exists()
        ]


def _find_cached(source: TokenizerSource) -> _Cached | None:
    """Return the cached files of a repository's revision, or None if `tokenizer.json` is not among them."""
    root = cache_directory() / ("models--" + source.id.replace("/", "--"))
    commit = revision = source.revision or _DEFAULT_REVISION
    with suppress(OSError):  # without a ref the revision is itself a commit, or not in the cache
        commit = (root / "refs" / revision).read_text(encoding="utf-8").strip()
    directory = root / "snapshots" / commit
    if not (directory / TOKENIZER_FILE).is_file():
        return None
    return _Cached(directory, root / ".no_exist" / commit)


# ------------------------------------------------------------------------------------------- the network


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
