"""Tokenizer files shared by several tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.vocabularies import KINDS


class Folders(dict[str, Path]):
    """The directory of each kind of tokenizer, by the name of the kind. It is written at the first use."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, kind: str) -> Path:
        self[kind] = KINDS[kind](self._root / kind)
        return self[kind]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("tokenizers"))
