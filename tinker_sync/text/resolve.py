"""From the name of a model to the tokenizer it uses; whether there is one is seen when loading."""

from __future__ import annotations

import os
from typing import Final

from attrs import frozen

LLAMA_3: Final = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The open copy of a tokenizer whose own repositories ask for a licence first."""

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
_HOUSE_PREFIXES: Final = ("TML/", "thinkingmachines/")


@frozen
class Source:
    """Where a tokenizer comes from: a repository's id and revision, or a directory.

    `runs_code` says that the repository's own code builds the tokenizer, reviewed at the pinned revision.
    """

    id: str
    revision: str | None = None
    runs_code: bool = False

    @property
    def is_directory(self) -> bool:
        """Whether the id is a place on this machine rather than a repository."""
        return looks_like_path(self.id) or os.path.isdir(self.id)

    @property
    def is_of_the_house(self) -> bool:
        """Whether the vendor's own package builds this tokenizer, and nothing else can."""
        return self.id.startswith(_HOUSE_PREFIXES)


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a place on this machine.

    >>> looks_like_path("/models/mine"), looks_like_path("org/model")
    (True, False)
    """
    return os.path.isabs(name) or name.startswith(("./", "../", "~", ".\\", "..\\"))


def resolve(model_name: str, tokenizer_id: str | None = None) -> Source:
    """The tokenizer of a model: what the server says, else what its name says.

    Args:
        model_name: such as `org/model`, `org/model:variant`, `org/model/variant` or a directory.
        tokenizer_id: what the server gave as the tokenizer's id, if it gave one.

    >>> resolve("org/model/variant:fast").id, resolve("any", "org/other:8").id
    ('org/model', 'org/other')
    """
    given = tokenizer_id or model_name
    if looks_like_path(given) or os.path.isdir(given):
        return Source(os.path.realpath(os.path.expanduser(given)))
    name = given.partition(":")[0]
    if not tokenizer_id:
        name = _by_family(name)
    pinned = _PINNED.get(name)
    return Source(name) if pinned is None else Source(*pinned, runs_code=True)


def _by_family(model_name: str) -> str:
    if model_name.startswith("meta-llama/Llama-3"):
        return LLAMA_3
    if model_name.count("/") == 2:
        return model_name.rpartition("/")[0]
    return model_name
