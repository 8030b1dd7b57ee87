"""Rules from the name of a model to the source of its tokenizer. They do not check that it exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from attrs import frozen

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

    `runs_code` means that the repository's own code builds the tokenizer. Such a revision is pinned.
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
