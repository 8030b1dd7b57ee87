"""The statements of a module, for tests that read the package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(
    tree: ast.AST, kinds: tuple[type[ast.AST], ...], *, inside: bool = False
) -> Iterator[tuple[ast.AST, bool]]:
    """Yield each statement of a tree, with True if it is inside a statement of one of `kinds`, else False."""
    inside = inside or isinstance(tree, kinds)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield node, inside
            yield from statements(node, kinds, inside=inside)
