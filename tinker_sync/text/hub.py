"""Files of a tokenizer: in a directory, or in the hub's cache, which is filled when there is network.

The cache is read here directly, which needs no network and loads nothing. What it lacks is fetched by the
hub's own library, which comes with `tokenizers`: it knows the host, tokens, proxies, locks between processes
and the layout it writes.
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
from tinker_sync.text.resolve import Source

_log = logging.getLogger(__name__)

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
WANTED: Final = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)
"""What every load asks for."""
LEGACY: Final = ("special_tokens_map.json", "added_tokens.json")
"""What older repositories keep beside a configuration that lists no added tokens."""

_REPOSITORY: Final = re.compile(r"[\w.-]+(?:/[\w.-]+)?", re.ASCII)
_TRUE: Final = {"1", "ON", "YES", "TRUE"}
_DEFAULT_REVISION: Final = "main"


@frozen
class Place:
    """Where files lie, and which are known not to exist upstream."""

    directory: Path
    absent: Path | None = None
    """A directory with an empty file for each that the hub was asked for in vain."""

    def has(self, name: str) -> bool:
        return (self.directory / name).is_file()

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Files that nobody has looked for yet."""
        if self.absent is None:
            return []
        return [name for name in names if not self.has(name) and not (self.absent / name).exists()]


def find(source: Source) -> Place:
    """The files of a tokenizer, fetched if they have to be and can be.

    Raises:
        TokenizerError: there is none; the text says where it was looked for and what to do.
    """
    if source.is_directory:
        return _in_directory(source)
    if not _REPOSITORY.fullmatch(source.id) or ".." in source.id:
        raise TokenizerError(f"{source.id!r} is neither a directory nor the id of a repository", source.id)
    place = cached(source)
    if place is None or place.unknown(WANTED):
        place = _complete(source, place, WANTED)
    return place


def complete(source: Source, place: Place, names: Sequence[str]) -> Place:
    """The same place after a look for more files that may exist."""
    return _complete(source, place, names) if place.unknown(names) else place


def _in_directory(source: Source) -> Place:
    place = Place(Path(source.id))
    if place.has(TOKENIZER_FILE):
        return place
    what = f"has no {TOKENIZER_FILE}" if place.directory.is_dir() else "does not exist"
    raise TokenizerError(
        f"the directory {source.id} {what}; put the model's {TOKENIZER_FILE} and {CONFIG_FILE} there",
        source.id,
    )


# ------------------------------------------------------------------------------------------- the hub's cache


def cache_directory() -> Path:
    """Where the hub's library keeps what it fetched, by the variables it obeys itself."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return _expanded(os.environ[name])
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return _expanded(home) / "hub"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


def offline() -> bool:
    """Whether the user has forbidden the hub's library to use the network."""
    return any(
        os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def cached(source: Source) -> Place | None:
    """What the cache has of a repository at the wanted revision, None without its tokenizer."""
    root = cache_directory() / ("models--" + source.id.replace("/", "--"))
    commit = revision = source.revision or _DEFAULT_REVISION
    with suppress(OSError):  # without it the revision is a commit's own name, or there is nothing
        commit = (root / "refs" / revision).read_text(encoding="utf-8").strip()
    place = Place(root / "snapshots" / commit, root / ".no_exist" / commit)
    return place if place.has(TOKENIZER_FILE) else None


# ------------------------------------------------------------------------------------------- the network


def _complete(source: Source, place: Place | None, names: Sequence[str]) -> Place:
    """Fetch what nobody has looked for; without network be content with a tokenizer that is there."""
    if offline():
        if place is None:
            raise TokenizerError(_missing(source, "HF_HUB_OFFLINE is set"), source.id)
        return place
    try:
        for name in names if place is None else place.unknown(names):
            _fetch(source, name)
    except _NotThereError as error:
        raise TokenizerError(_unusable(source, str(error)), source.id) from error.__cause__
    except Exception as error:
        if place is None:
            raise TokenizerError(_missing(source, _first_line(error)), source.id) from error
        _log.warning(
            "%s: could not look for %s (%s); using what the cache has",
            *(source.id, ", ".join(place.unknown(names)), _first_line(error)),
        )
        return place
    found = cached(source)
    if found is None:
        raise TokenizerError(_missing(source, "the hub's library keeps its files elsewhere"), source.id)
    return found


class _NotThereError(Exception):
    """The hub was reached and has no such thing for this user."""


def _fetch(source: Source, name: str) -> None:
    """Have the hub's library put one file into the cache, or note that there is none."""
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.utils")
    try:
        hub.hf_hub_download(source.id, name, revision=source.revision)
    except errors.LocalEntryNotFoundError:
        raise  # no network: the hub said nothing about the file
    except errors.EntryNotFoundError as error:
        if name == TOKENIZER_FILE:
            raise _NotThereError(f"it has no {TOKENIZER_FILE}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise _NotThereError(_first_line(error)) from error


def _missing(source: Source, why: str) -> str:
    revision = f" --revision {source.revision}" if source.revision else ""
    where = cache_directory()
    return (
        f"the tokenizer {source.id!r} is not in {where} and could not be fetched ({why}). On a machine with "
        f"network run `hf download {source.id} {TOKENIZER_FILE} {CONFIG_FILE} {TEMPLATE_FILE}{revision}` and "
        f"copy its cache to {where}, or put these files into a directory and give its path instead."
    )


def _unusable(source: Source, why: str) -> str:
    advice = (
        "Code of the repository builds its tokenizer; get_tokenizer(backend='transformers') runs it."
        if source.runs_code
        else "get_tokenizer(backend='transformers') reads older formats; HF_TOKEN opens what not all may see."
    )
    return f"the repository {source.id!r} cannot be used: {why}. {advice}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
