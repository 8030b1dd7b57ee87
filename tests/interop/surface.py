"""The public surface of the reference client, read from its sources and by introspection.

Every item is a text, such as `tinker.lib.retry_handler.RetryConfig`, `tinker checkpoint list --limit` or
`tinker.RestClient.get_session(access_scope)`. `test_names.py` compares them with the items of this package.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture")


def modules(package: Any) -> dict[str, Path]:
    """Return the files of a package's public modules, by the modules' names. Tests are left out."""
    root = Path(package.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") or part.endswith("_test") for part in parts):
            found[".".join((package.__name__, *parts))] = path
    return found


def names(path: Path) -> Iterator[str]:
    """Yield the public names that a module defines, or imports from modules beside it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = [node.name]
        elif isinstance(node, ast.Assign):
            found = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found = [node.target.id]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found = [alias.asname or alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in found if not name.startswith("_"))


def parameters(cls: type[Any], method: str) -> list[str]:
    """Return the names of a method's parameters.

    An `..._async` method that takes `**kwargs` passes them on to the plain method, whose names are returned.
    """
    if not callable(getattr(cls, method)):
        return []
    found = inspect.signature(getattr(cls, method)).parameters
    if "kwargs" in found and method.endswith("_async"):
        found = inspect.signature(getattr(cls, method.removesuffix("_async"))).parameters
    return [name for name in found if name not in ("self", "args", "kwargs")]


def methods(package: Any, cls: type[Any]) -> Iterator[str]:
    """Yield the items for the public methods of a class and for each of their parameters."""
    for name in dir(cls):
        if name.startswith("_"):
            continue
        yield f"{package.__name__}.{cls.__name__}.{name}"
        for parameter in parameters(cls, name):
            yield f"{package.__name__}.{cls.__name__}.{name}({parameter})"


@functools.cache
def api(package: Any) -> frozenset[str]:
    """Return the items of a package: names in its modules, and methods of clients with their parameters."""
    found = {
        f"{module}.{name}"
        for module, path in modules(package).items()
        for name in (*names(path), *getattr(importlib.import_module(module), "__all__", ()))
    }
    for name in CLIENTS:
        found |= set(methods(package, getattr(package, name)))
    return frozenset(found) | {
        f"{package.__name__}.ServiceClient({name})" for name in parameters(package.ServiceClient, "__init__")
    }


def offers(package: Any, item: str) -> bool:
    """Return True if a package has the same name, method or parameter as an item of another package.

    Args:
        package: the package to search, such as `tinker_sync`.
        item: a text that `api` returns, such as `tinker.RestClient.get_session(access_scope)`. Its first
            name is replaced with that of `package`.
    """
    path, _, parameter = item.removesuffix(")").partition("(")
    parts = [package.__name__, *path.split(".")[1:]]
    found, depth = _module(parts)
    for name in parts[depth:]:
        if not hasattr(found, name):
            return False
        owner, found = found, getattr(found, name)
    if not parameter:
        return True
    return parameter in (
        parameters(found, "__init__") if inspect.isclass(found) else parameters(owner, found.__name__)
    )


def _module(parts: list[str]) -> tuple[Any, int]:
    """Return the innermost module on a dotted path, and the number of parts that lead to it."""
    for depth in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:depth])), depth
        except ImportError:
            continue
    raise AssertionError(parts)


def commands(group: Any, path: str) -> Iterator[str]:
    """Yield the items of a command or group: its options and arguments, and those of all its commands."""
    context = click.Context(group)
    for parameter in group.params:
        for option in parameter.opts if isinstance(parameter, click.Option) else [parameter.name.upper()]:
            yield f"{path} {option}"
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            yield f"{path} {name}"
            yield from commands(group.get_command(context, name), f"{path} {name}")
